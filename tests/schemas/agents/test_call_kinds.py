"""The kind of a call, as its request shows it, and names of agents that stay the same."""

from typing import Any

import pytest

from trainspan_schemas.agents.call_kinds import RequestKind, kind_of_request, stated_in_headers
from trainspan_schemas.agents.unnamed_agents import agent_of_request

TOOL = {"type": "function", "function": {"name": "bash", "description": "Runs in /home/a."}}
TASK = {"role": "user", "content": "Fix the bug in main.py."}
ANSWER = {"role": "assistant", "content": "Done."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"messages": [system("You are a title generator. Output only a title."), TASK]}, ("title", "system_prompt")),
        ({"system": "x", "messages": [user("Write a short title for this conversation.")]}, ("title", "last_message")),
        ({"instructions": "You summarize conversations.", "input": [TASK]}, ("summary", "system_prompt")),
        (
            {"tools": [TOOL], "messages": [TASK, ANSWER, user("Write a detailed summary of the conversation so far.")]},
            ("summary", "last_message"),
        ),
        (
            {"tools": [TOOL], "input": [TASK, {"type": "function_call"}, user("Create a handoff summary of the session.")]},
            ("summary", "last_message"),
        ),
        (
            {"system": "s", "tools": [TOOL], "messages": [TASK, ANSWER, {"role": "user", "content": [
                {"type": "text", "text": "Compact the context of our work."}]}]},
            ("summary", "last_message"),
        ),
        ({"messages": [TASK]}, ("other", "no_tools")),
        ({"tools": [TOOL], "messages": [system("The conversation is summarized when it is long."), TASK]}, None),
        ({"tools": [TOOL], "messages": [user("Summarize the chat in chat.txt.")]}, None),
        ({"tools": [TOOL], "messages": [TASK, ANSWER, {"role": "tool", "content": "summary of the conversation"}]}, None),
        ({"tools": [TOOL], "messages": [TASK, ANSWER, user("Now give the page a title.")]}, None),
        ({"tools": [TOOL], "messages": [TASK, ANSWER, user(
            "The conversation was compacted and media files were removed from context.\n\nContinue if you have next steps.")]}, None),
        (
            {"system": [{"type": "text", "text": "x-vendor-billing-header: v=2.1; cc_is_subagent=true;"}], "tools": [TOOL]},
            ("sub_agent", "header_line"),
        ),
        ({"system": "x-vendor-billing-header: v=2.1; cc_is_subagent=false;", "tools": [TOOL]}, None),
        ({"prompt": "x"}, ("other", "no_tools")),
        ({"messages": "x", "input": 3, "tools": 4}, None),
    ],
)  # fmt: skip
def test_a_request_shows_whether_it_asks_for_a_title_or_a_summary(
    request_: dict[str, Any], kind: tuple[str, str] | None
) -> None:
    found = kind_of_request(request_)
    assert found == (None if kind is None else RequestKind(*kind))  # type: ignore[arg-type]


def name(prompt: str, tool: str = "") -> str | None:
    return agent_of_request({"system": prompt, "tools": [{"name": "bash", "description": tool}], "messages": [TASK]})


BASE = "You are a coding agent.\nBe brief.\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Folder: /tmp/a1/work", "Folder: /home/me/x"),
        ("Folder: C:\\work\\a", "Folder: ~/x\nNotes of the project: no tabs."),
        ("Today is 2026-11-27", "Today is 2025-01-02"),
        ("Today's date: Fri Nov 27 2026", "Today's date: Sat Nov 28 2026"),
        ("Date: November 27, 2026", "Date: 3 May 2025"),
        ("Branch main at a49e5f33", "Branch main at b329a822c0"),
        ("Session 00132d07-afb1-43f4-b6a7-83858133a88d", "Session 9f132d07-afb1-43f4-b6a7-83858133a88e"),
        ("Server http://127.0.0.1:8000/v1", "Server http://127.0.0.1:9000/v1"),
        ("It is 10:15", "It is 11:20:05"),
    ],
)
def test_a_name_does_not_change_with_what_a_harness_writes_of_its_place_and_time(one: str, other: str) -> None:
    assert name(BASE + one) == name(BASE + other) == name(BASE + one + "\nfiles: a.py b.py") is not None
    assert name(one) != name(BASE + one)


def test_a_name_does_not_change_with_a_line_for_the_vendors_server_or_a_tools_description() -> None:
    billing = "x-vendor-billing-header: version=2.1.f94\n"
    assert name(billing + BASE, "in /a/b") == name(billing.replace("f94", "f9d") + BASE, "in /c/d") == name(BASE)


def test_agents_with_other_instructions_or_other_tools_have_other_names() -> None:
    names = {
        name(BASE),
        name("You review code.\nBe brief.\n"),
        name("/work/repo is the folder of the planner."),
        name("/work/repo is the folder of the writer."),
        agent_of_request({"system": BASE, "tools": [{"name": "read"}]}),
        agent_of_request({"system": BASE}),
    }
    assert len(names) == 6


def test_a_header_that_names_the_agent_comes_first() -> None:
    def stated(value: str, name: bytes = b"x-vendor-turn-metadata") -> tuple[str | None, RequestKind | None]:
        return stated_in_headers([(b"accept", b"*/*"), (name, value.encode())])

    assert stated('{"agent_name": "/root", "request_kind": "turn"}') == ("/root", None)
    assert stated('{"agent_name": "/root", "request_kind": "compaction"}') == (
        "/root",
        RequestKind("summary", "header"),
    )
    helper = '{"agent_name": "/root", "request_kind": "%s", "subagent_kind": "thread_spawn"}'
    assert stated(helper % "turn") == ("/root/thread_spawn", RequestKind("sub_agent", "header"))
    assert stated(helper % "compaction") == ("/root/thread_spawn", RequestKind("summary", "header"))
    assert stated('{"agent_name": "/root", "subagent_kind": 3}') == ("/root", None)
    assert stated('{"agent_name": "/root"}', b"metadata") == (None, None)
    for value in ('{"agent_name": ""}', '{"agent_name": 3}', "[]", "{", "\xff"):
        assert stated(value) == (None, None)

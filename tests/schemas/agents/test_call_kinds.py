"""The kind of a call, as its request shows it, and names of agents that stay the same."""

import json
from typing import Any, get_args

import pytest

from tests.support.policy_server.other_types import with_other_types
from trainspan_schemas.agents.call_kinds import RequestKind, kind_of_request, stated_in_headers
from trainspan_schemas.agents.unnamed_agents import agent_of_request
from trainspan_schemas.telemetry.status import CallKind

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


@pytest.mark.parametrize(
    "text",
    [
        "<title>Login</title><script>session=1",
        "SELECT title FROM history",
        "models.py: title = Column()\nclass Thread",
        "Context:\n[1] Title: Arthur's Magazine",
        "Add a title field to the session model.",
        "Create a title field for the session model.",
        "Write the chat title component.",
        "Write a title generator for chat sessions.",
        "Give the page a title. It is shown in the chat.",
    ],
)
def test_text_about_titles_asks_for_none(text: str) -> None:
    messages = [system("You help."), TASK, ANSWER, user(text)]
    assert kind_of_request({"messages": messages}) == RequestKind("other", "no_tools")
    assert kind_of_request({"messages": messages[:1] + messages[3:]}) == RequestKind("other", "no_tools")


@pytest.mark.parametrize(
    "text",
    [
        "Generate a title for this conversation:\nhello",
        "Please write a 5-10 word title for the following conversation:\n\nhello",
        "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.",
        "Generate a concise, sentence-case title (3-7 words) that captures the main topic of this coding session. Be brief.",
        "Please generate a title and branch name for this session.",
        "Based on the following conversation, suggest a title:",
        "Create a short chat title",
        "You generate concise, human-readable titles for chat threads.",
    ],
)
def test_a_title_is_asked_for_in_the_first_sentence(text: str) -> None:
    assert kind_of_request({"messages": [system("You help."), user(text)]}) == RequestKind("title", "last_message")
    assert kind_of_request({"system": text, "messages": [TASK]}) == RequestKind("title", "system_prompt")
    assert kind_of_request({"system": text, "messages": [TASK], "tools": [TOOL]}) is None


@pytest.mark.parametrize(
    "text",
    [
        "Refactor summarize() in chat history module",
        "Now write HANDOFF.md for the next session.",
        "Context compaction: 80% of the context used. Continue.",
        "Go on. The conversation is summarized below:\nWe read a file.",
        "The conversation history before this point was compacted into the following summary:\n\nWe read a file.",
        "This session is being continued from a previous conversation. The summary below covers its earlier portion.",
        "Another language model produced a summary of its thinking process. Use the summary in this conversation.",
        "Summarize the session handling code.",
        "Write a summary of the chat feature.",
        "Create a summary page for the session list.",
        "Read the session module. Then write a summary in NOTES.md.",
        "Compact the session table in sessions.py",
    ],
)
def test_text_about_summaries_asks_for_none(text: str) -> None:
    assert kind_of_request({"tools": [TOOL], "messages": [TASK, ANSWER, user(text)]}) is None
    assert kind_of_request({"messages": [TASK, ANSWER, user(text)]}) == RequestKind("other", "no_tools")


@pytest.mark.parametrize(
    "text",
    [
        "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM that will resume it.",
        "CRITICAL: text only. Your task is to create a detailed summary of the conversation so far, with all requests.",
        "Create a checkpoint of the work so far, with the files.",
        "Provide a summary of the work done so far and the next steps.",
        "Please summarize our conversation in five lines.",
        "line of a log\n" * 400 + "Now summarize the conversation above.",
        "The messages above are a conversation to summarize. Create a structured context checkpoint summary.",
    ],
)
def test_the_last_message_asks_for_a_summary_at_its_beginning_or_its_end(text: str) -> None:
    wanted = RequestKind("summary", "last_message")
    assert kind_of_request({"tools": [TOOL], "messages": [TASK, ANSWER, user(text)]}) == wanted
    assert kind_of_request({"messages": [user(text)]}) == wanted
    assert kind_of_request({"tools": [TOOL], "messages": [user(text)]}) is None


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("You are a title generator. You output ONLY a thread title. Nothing else.", "title"),
        ("You are a context summarization agent. You are given a conversation between a user and an agent.", "summary"),
        ("You are a context summarization assistant. Your task is to read a conversation.", "summary"),
        ("You are a summarization agent creating a context checkpoint.", "summary"),
        ("You are the component that summarizes internal chat history into a given structure.", "summary"),
        ("*Briefly* summarize this partial conversation about programming.\nInclude less detail.", "summary"),
        ("You are a helpful AI assistant tasked with summarizing conversations.", "summary"),
        ("You review the code of a chat application.", "other"),
    ],
)
def test_the_prompts_of_known_harnesses_show_their_kind(prompt: str, kind: str) -> None:
    found = kind_of_request({"messages": [system(prompt), TASK]})
    assert (found and found.kind) == kind


def test_values_of_any_type_are_read_without_an_error() -> None:
    whole = {
        "instructions": "s", "system": [{"type": "text", "text": "s"}], "tools": [TOOL, {"name": "f", "type": "custom"}],
        "messages": [
            {"role": "system", "content": "s"}, {"role": "assistant", "type": "reasoning", "content": [{"text": "a"}]}, TASK,
        ],
    }  # fmt: skip
    for changed in with_other_types(whole):
        for request in (changed, {"input" if key == "messages" else key: value for key, value in changed.items()}):
            found = kind_of_request(request)
            assert found is None or found.kind in get_args(CallKind)
            assert isinstance(agent_of_request(request), str | None)
    for stated in with_other_types({"agent_name": "a", "request_kind": "turn", "subagent_kind": "s"}):
        agent, _ = stated_in_headers([(b"x-vendor-metadata", json.dumps(stated).encode())])
        assert agent is None or agent


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
    assert name(one + "\n" + BASE) == name(other.partition("\n")[0] + "\n" + BASE) == name(BASE)


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
    half = '{"agent_name": "a\\ud800", "subagent_kind": "\\udfff"}'
    assert stated(half) == ("a\\ud800/\\udfff", RequestKind("sub_agent", "header"))
    assert stated('{"agent_name": "/root", "request_kind": ["title"]}') == ("/root", None)
    for value in ('{"agent_name": ""}', '{"agent_name": 3}', "[]", "{", "\xff"):
        assert stated(value) == (None, None)

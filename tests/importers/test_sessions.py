"""Transcripts of Claude Code and Codex, and ATIF trajectories: contexts of calls, tools, sub-agents, usage and tokens."""

import json
from pathlib import Path
from typing import Any

from tests.importers.reading import Seen, lines, read, said, tree
from trainspan_importers.traces import UNDATED_NS
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs

T0 = 1_767_323_040  # 2026-01-02T03:04:00Z


def _entry(
    kind: str, uuid: str, parent: str | None, second: int, message: dict[str, Any], **more: Any
) -> dict[str, Any]:
    stamp = f"2026-01-02T03:04:{second:02}.000Z"
    ids = {"uuid": uuid, "parentUuid": parent, "sessionId": "session-1", "timestamp": stamp}
    return {"type": kind, **ids, "cwd": "/repo", "version": "2.0.1", "message": message, **more}


def _user(uuid: str, parent: str | None, second: int, content: Any, **more: Any) -> dict[str, Any]:
    return _entry("user", uuid, parent, second, {"role": "user", "content": content}, **more)


def _assistant(uuid: str, parent: str, second: int, answer: str, block: dict[str, Any], **more: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": 2,
        "cache_read_input_tokens": 10,
        "cache_creation_input_tokens": 3,
        "output_tokens": second,
    }
    message = {"id": answer, "role": "assistant", "model": "claude-x", "content": [block], "usage": usage}
    return _entry("assistant", uuid, parent, second, {**message, **more.pop("message", {})}, **more)


def _result(tool: str, text: str, *, is_error: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "tool_result", "tool_use_id": tool, "content": [{"type": "text", "text": text}], "is_error": is_error}
    ]


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "sig"}
LIST = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}}
READ = {"type": "tool_use", "id": "c2", "name": "Read", "input": {"path": "a.py"}}


CLAUDE_CODE = (
    {"type": "summary", "summary": "x", "leafUuid": "u9"},
    _user("u1", None, 1, "fix it"),
    _assistant("a1", "u1", 3, "m1", THOUGHT),
    _assistant("a2", "a1", 4, "m1", LIST),
    _user("u2", "a2", 6, _result("c1", "a.py"), toolUseResult={"stdout": "a.py"}),
    _assistant("a3", "a2", 5, "m1", READ, message={"stop_reason": "tool_use"}),
    _user("u3", "a3", 7, _result("c2", "no such file", is_error=True)),
    _assistant("a4", "u3", 9, "m2", {"type": "text", "text": "fixed"}, message={"stop_reason": "end_turn"}),
    _user("u4", "u1", 20, "no, differently"),
    _assistant("a5", "u4", 22, "m3", {"type": "text", "text": "ok"}, message={"stop_reason": "max_tokens"}),
)


def test_claude_code_puts_an_answer_together_and_gives_each_call_its_context(tmp_path: Path) -> None:
    """Two tools at once: the result of the first one comes between the parts of the answer."""
    found = read(lines(tmp_path / "session-1.jsonl", *CLAUDE_CODE))
    first, second, third = found.calls
    used = [
        {"type": "tool_call", "name": "Bash", "arguments": {"command": "ls"}, "id": "c1"},
        {"type": "tool_call", "name": "Read", "arguments": {"path": "a.py"}, "id": "c2"},
    ]
    answer = said(
        "assistant", {"type": "reasoning", "content": "hm", "signature": "sig"}, *used, finish_reason="tool_calls"
    )
    assert first.messages("input") == [said("user", "fix it")]
    assert first.messages("output") == [answer]
    assert (first.start_ns, first.end_ns) == ((T0 + 1) * 10**9, (T0 + 5) * 10**9)
    assert {
        keys.GEN_AI_REQUEST_MODEL: "claude-x",
        keys.GEN_AI_RESPONSE_ID: "m1",
        keys.GEN_AI_AGENT_NAME: "claude-code",
        keys.GEN_AI_INPUT_TOKENS: 15,
        keys.GEN_AI_OUTPUT_TOKENS: 5,
        "gen_ai.usage.cache_read.input_tokens": 10,
    }.items() <= first.attributes.items()
    results = [
        said("user", {"type": "tool_call_response", "response": "a.py", "id": "c1"}),
        said("user", {"type": "tool_call_response", "response": "no such file", "id": "c2", "is_error": True}),
    ]
    assert second.messages("input") == [said("user", "fix it"), answer, *results]
    assert third.messages("input") == [said("user", "fix it"), said("user", "no, differently")]
    assert third.attributes[keys.GEN_AI_FINISH_REASONS] == ["length"]
    listed, opened = found.tools
    assert (listed.attributes["gen_ai.tool.call.arguments"], listed.failed) == ('{"command":"ls"}', None)
    assert (listed.start_ns, listed.end_ns) == ((T0 + 5) * 10**9, (T0 + 6) * 10**9)
    assert (opened.name, opened.failed) == ("execute_tool Read", "the tool failed")
    (root,) = found.roots
    assert (root.attributes["session.id"], root.attributes["claude_code.cwd"]) == ("session-1", "/repo")
    assert (root.start_ns, root.end_ns) == ((T0 + 1) * 10**9, (T0 + 22) * 10**9)
    assert found.account.left_out == {"summary entry": 1, "toolUseResult (the result itself is kept)": 1}


def test_claude_codes_sub_agents_and_compacted_contexts_have_conversations_of_their_own(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "x7"}
    found = read(
        lines(
            tmp_path / "session-1.jsonl",
            _user("u1", None, 1, "fix it"),
            _user("s1", None, 2, "look around", **side),
            _assistant("s2", "s1", 3, "ms", {"type": "text", "text": "seen"}, **side),
            _assistant("a1", "u1", 4, "m1", {"type": "text", "text": "done"}),
            _user("u2", None, 5, "This session continues: it was fixed.", isCompactSummary=True),
            _assistant("a2", "u2", 6, "m2", {"type": "text", "text": "good"}),
        )
    )
    contexts = {call.attributes[keys.GEN_AI_RESPONSE_ID]: call.messages("input") for call in found.calls}
    assert contexts == {
        "ms": [said("user", "look around")],
        "m1": [said("user", "fix it")],
        "m2": [said("user", "This session continues: it was fixed.")],
    }
    agents = {call.attributes[keys.GEN_AI_RESPONSE_ID]: call.parent for call in found.calls}
    names = {span.id: span.name for span in found.spans}
    assert {answer: names[parent] for answer, parent in agents.items()} == {
        "ms": "sub-agent",
        "m1": "session",
        "m2": "session",
    }
    assert tree([span for span in found.spans if span not in found.calls]) == {"session": None, "sub-agent": "session"}


def test_a_session_that_grew_has_the_same_ids_and_more_spans(tmp_path: Path) -> None:
    entries = [_user("u1", None, 1, "fix it"), _assistant("a1", "u1", 4, "m1", {"type": "text", "text": "done"})]
    before = read(lines(tmp_path / "session-1.jsonl", *entries))
    more = [_user("u2", "a1", 5, "thanks"), _assistant("a2", "u2", 6, "m2", {"type": "text", "text": "!"})]
    after = read(lines(tmp_path / "session-1.jsonl", *entries, *more))
    assert [(span.id, span.start_ns) for span in before.spans] == [(span.id, span.start_ns) for span in after.spans[:2]]
    assert len(after.spans) == 3


def _codex(kind: str, second: int, **payload: Any) -> dict[str, Any]:
    return {"timestamp": f"2026-01-02T03:04:{second:02}.000Z", "type": kind, "payload": payload}


CODEX = (
    _codex(
        "session_meta", 0, id="s-1", cwd="/repo", cli_version="0.50.0", instructions="Be good.", git={"branch": "main"}
    ),
    _codex("turn_context", 0, model="gpt-5-codex", approval_policy="never"),
    _codex("response_item", 1, type="message", role="user", content=[{"type": "input_text", "text": "fix it"}]),
    _codex("event_msg", 1, type="user_message", message="fix it"),
    _codex(
        "response_item", 2, type="reasoning", summary=[{"type": "summary_text", "text": "Look."}], encrypted_content="…"
    ),
    _codex("response_item", 3, type="function_call", name="shell", arguments='{"command":["ls"]}', call_id="k1"),
    _codex(
        "event_msg",
        3,
        type="token_count",
        info={"last_token_usage": {"input_tokens": 9, "cached_input_tokens": 4, "output_tokens": 5}},
    ),
    _codex(
        "response_item", 5, type="function_call_output", call_id="k1", output={"content": "denied", "success": False}
    ),
    _codex("response_item", 6, type="message", role="assistant", content=[{"type": "output_text", "text": "done"}]),
    _codex("event_msg", 6, type="turn_aborted", reason="interrupted"),
)


def test_codex_has_a_call_between_each_two_inputs(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "rollout.jsonl", *CODEX))
    first, second = found.calls
    asked = [said("system", "Be good."), said("user", "fix it")]
    call = {"type": "tool_call", "name": "shell", "arguments": '{"command":["ls"]}', "id": "k1"}
    answer = said("assistant", {"type": "reasoning", "content": "Look."}, call)
    assert (first.messages("input"), first.messages("output")) == (asked, [answer])
    assert {
        keys.GEN_AI_REQUEST_MODEL: "gpt-5-codex",
        keys.GEN_AI_INPUT_TOKENS: 9,
        keys.GEN_AI_OUTPUT_TOKENS: 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
    }.items() <= first.attributes.items()
    assert (first.start_ns, first.end_ns) == ((T0 + 1) * 10**9, (T0 + 3) * 10**9)
    result = {"type": "tool_call_response", "response": "denied", "id": "k1", "is_error": True}
    assert second.messages("input") == [*asked, answer, said("tool", result)]
    assert second.messages("output") == [said("assistant", "done", finish_reason="cancelled")]
    (tool,) = found.tools
    assert (tool.failed, tool.start_ns, tool.end_ns) == ("the tool failed", (T0 + 3) * 10**9, (T0 + 5) * 10**9)
    (root,) = found.roots
    assert (root.attributes["codex.git"], root.attributes["codex.cwd"]) == ('{"branch":"main"}', "/repo")
    assert found.account.left_out == {
        "encrypted reasoning": 1,
        "event_msg user_message": 1,
        "event_msg turn_aborted": 1,
    }


def test_a_compacted_codex_session_goes_on_from_its_summary(tmp_path: Path) -> None:
    more = (
        _codex("compacted", 8, message="It was fixed."),
        _codex("response_item", 9, type="message", role="assistant", content=[{"type": "output_text", "text": "good"}]),
    )
    found = read(lines(tmp_path / "rollout.jsonl", *CODEX, *more))
    assert found.calls[-1].messages("input") == [said("user", "It was fixed.")]


def test_a_compacted_codex_session_goes_on_from_the_items_that_replace_it(tmp_path: Path) -> None:
    """What the model said between two inputs is one message; the tools in it ran before."""
    history = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
        {"type": "function_call", "name": "sh", "arguments": "{}", "call_id": "c9"},
        {"type": "function_call_output", "call_id": "c9", "output": "a.py"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is a.py."}]},
        7,
    ]
    more = (
        _codex("compacted", 8, message="", replacement_history=history),
        _codex("response_item", 9, type="message", role="assistant", content=[{"type": "output_text", "text": "good"}]),
    )
    before = read(lines(tmp_path / "before.jsonl", *CODEX))
    found = read(lines(tmp_path / "rollout.jsonl", *CODEX, *more))
    thought = {"type": "reasoning", "content": "hm"}
    call = {"type": "tool_call", "name": "sh", "arguments": "{}", "id": "c9"}
    assert found.calls[-1].messages("input") == [
        said("user", "fix it"),
        said("assistant", thought, call),
        said("tool", {"type": "tool_call_response", "id": "c9", "response": "a.py"}),
        said("assistant", "It is a.py."),
    ]
    assert len(found.tools) == len(before.tools)
    reasons = ("encrypted reasoning", "response_item compaction", "broken")
    lost = [found.account.left_out[reason] - before.account.left_out[reason] for reason in reasons]
    assert lost == [1, 1, 1]


ATIF = {
    "schema_version": "ATIF-v1.4",
    "session_id": "trial-1",
    "agent": {
        "name": "mini",
        "version": "1.0",
        "model_name": "m",
        "tool_definitions": [{"type": "function", "function": {"name": "sh"}}],
    },
    "steps": [
        {"step_id": 1, "timestamp": "2026-01-02T03:04:00Z", "source": "system", "message": "Be good."},
        {"step_id": 2, "timestamp": "2026-01-02T03:04:01Z", "source": "user", "message": "fix it"},
        {
            "step_id": 3,
            "timestamp": "2026-01-02T03:04:03Z",
            "source": "agent",
            "message": "Looking.",
            "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "sh", "arguments": {"c": "ls"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "a.py"}]},
            "metrics": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "cached_tokens": 1,
                "cost_usd": 0.25,
                "prompt_token_ids": [1, 2, 3],
                "completion_token_ids": [4, 5],
                "logprobs": [-0.5, -0.25],
            },
        },
        {
            "step_id": 4,
            "timestamp": "2026-01-02T03:04:05Z",
            "source": "agent",
            "message": "Done.",
            "metrics": {"completion_token_ids": [4]},
        },
    ],
    "final_metrics": {"total_cost_usd": 0.25},
    "notes": "n",
}


def test_atif_keeps_steps_tools_costs_and_whole_tokens(tmp_path: Path) -> None:
    (tmp_path / "trajectory.json").write_text(json.dumps(ATIF, indent=2))
    found = read(tmp_path / "trajectory.json")
    first, second = found.calls
    asked = [said("system", "Be good."), said("user", "fix it")]
    call = {"type": "tool_call", "name": "sh", "arguments": {"c": "ls"}, "id": "c1"}
    answer = said("assistant", {"type": "reasoning", "content": "hm"}, "Looking.", call)
    assert (first.messages("input"), first.messages("output")) == (asked, [answer])
    assert {
        keys.GEN_AI_REQUEST_MODEL: "m",
        keys.GEN_AI_AGENT_NAME: "mini",
        keys.GEN_AI_INPUT_TOKENS: 3,
        keys.GEN_AI_OUTPUT_TOKENS: 2,
        "gen_ai.usage.cost": 0.25,
        keys.PROMPT_TOKEN_IDS: encode_ids([1, 2, 3]),
        keys.COMPLETION_TOKEN_IDS: encode_ids([4, 5]),
        keys.COMPLETION_LOGPROBS: encode_logprobs([-0.5, -0.25]),
    }.items() <= first.attributes.items()
    result = {"type": "tool_call_response", "response": "a.py", "id": "c1"}
    assert second.messages("input") == [*asked, answer, said("tool", result)]
    assert keys.COMPLETION_TOKEN_IDS not in second.attributes
    assert (second.start_ns, second.end_ns) == ((T0 + 3) * 10**9, (T0 + 5) * 10**9)
    (tool,) = found.tools
    assert (tool.name, tool.attributes["gen_ai.tool.call.result"]) == ("execute_tool sh", "a.py")
    (root,) = found.roots
    assert (root.attributes["atif.final_metrics"], root.attributes["atif.notes"]) == ('{"total_cost_usd":0.25}', "n")
    assert found.account.left_out == {"tokens without ids, or without log-probabilities of all": 1}


def test_atif_steps_without_times_keep_their_order(tmp_path: Path) -> None:
    steps = [{name: item for name, item in step.items() if name != "timestamp"} for step in ATIF["steps"]]  # type: ignore[attr-defined]
    (tmp_path / "trajectory.json").write_text(json.dumps({**ATIF, "steps": steps}))
    calls: list[Seen] = read(tmp_path / "trajectory.json").calls
    assert [call.start_ns for call in calls] == [UNDATED_NS + 1000, UNDATED_NS + 2000]


def test_atif_sub_agents_are_agents_within_and_steps_without_a_model_are_no_calls(tmp_path: Path) -> None:
    asked = {"step_id": 1, "source": "user", "message": "sum up"}
    answered = {"step_id": 2, "source": "agent", "message": "Short."}
    fixed = {**answered, "message": "/clear", "llm_call_count": 0}
    inner = {"schema_version": "ATIF-v1.7", "agent": {"name": "helper", "version": "1"}, "trajectory_id": "t.1"}
    steps = [asked, fixed, {**answered, "step_id": 3, "extra": {"gen_ai.response.id": "x", "note": "n"}}]
    record = {**inner, "agent": {"name": "main", "version": "1"}, "steps": steps}
    embedded = [{**inner, "steps": [asked, answered], "extra": {"reward": 1.0}}, {**inner, "steps": []}]
    (tmp_path / "trajectory.json").write_text(json.dumps({**record, "subagent_trajectories": embedded}))
    imported = read(tmp_path / "trajectory.json")
    assert tree(imported.spans, lambda span: f"{span.name} {span.attributes['gen_ai.agent.name']}") == {
        "main main": None,
        "chat main": "main main",
        "helper helper": "main main",
        "chat helper": "helper helper",
    }
    first, second = imported.calls
    assert [message["role"] for message in first.messages("input")] == ["user", "assistant"]
    assert (first.attributes["gen_ai.response.id"], first.attributes["atif.step.extra.note"]) == ("x", "n")
    assert second.messages("input") == [said("user", "sum up")]
    assert imported.account.left_out == {"sub-agents without steps": 1, "rewards of sub-agents": 1}

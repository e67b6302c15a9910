"""Ids of tool calls in answers, and results in requests, in the forms of three APIs."""

import json
from typing import Any

import pytest

from tests.support.policy_server.other_types import with_other_types
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.tools import ToolResult, results_from_json, results_to_json
from trainspan_serving.capture.tool_use import tool_calls_in_answer, tool_results_in_request


def _event(**said: Any) -> bytes:
    return f"event: any\ndata: {json.dumps(said)}\n\n".encode()


def _chat(index: int, key: str, *ids: str | None) -> dict[str, Any]:
    calls = [{"index": at, "id": call_id, "function": {"name": "f"}} for at, call_id in enumerate(ids)]
    return {"index": index, key: {"content": '"tool_calls": [{"id": "no"}]', "tool_calls": calls}}


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (json.dumps({"choices": [_chat(0, "message", "a", "b"), _chat(1, "message", "c")]}).encode(), ["0 a", "0 b", "1 c"]),
        (_event(choices=[_chat(1, "delta", "a", None)]) + b"data: [DONE]\n\n", ["1 a"]),
        (_event(type="response.output_item.done", item={"type": "function_call", "call_id": "a", "id": "fc_1"}), ["0 a"]),
        (json.dumps({"output": [{"type": "custom_tool_call", "call_id": "a"}, {"type": "message"}]}).encode(), ["0 a"]),
        (_event(type="content_block_start", content_block={"type": "tool_use", "id": "a", "name": "f"}), ["0 a"]),
        (json.dumps({"content": [{"type": "text", "text": "x"}, {"type": "tool_use", "id": "a"}]}).encode(), ["0 a"]),
        (json.dumps({"choices": [{"message": {"content": 'say {"tool_calls": [{"id": "a"}]}'}}]}).encode(), []),
        (b'data: {"tool_calls": [{"id": "cut', []),
    ],
)  # fmt: skip
def test_the_ids_in_an_answer_are_found_whole_or_streamed_and_never_in_its_text(body: bytes, calls: list[str]) -> None:
    assert [f"{choice} {call_id}" for choice, call_id in tool_calls_in_answer(body)] == calls


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "assistant", "tool_calls": [{"id": "old", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "old", "content": "before"},
    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    {
        "role": "tool",
        "tool_call_id": "a",
        "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    },
    {"role": "tool", "tool_call_id": "unknown", "content": ""},
]
RESPONSES = [
    {"role": "user", "content": "go"},
    {"type": "reasoning", "summary": []},
    {"type": "function_call", "call_id": "a", "namespace": "desk", "name": "f", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** Begin"},
    {"type": "function_call_output", "call_id": "a", "output": "one"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": {"code": 1}},
]
MESSAGES = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls"}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "no such file", "is_error": True},
            {"type": "text", "text": "and now?"},
        ],
    },
]


@pytest.mark.parametrize(
    ("request_", "results"),
    [
        (
            {"messages": CHAT},
            [ToolResult("a", "f", '{"x": 1}', "one\ntwo", None), ToolResult("unknown", None, None, "", None)],
        ),
        (
            {"input": RESPONSES},
            [ToolResult("a", "desk__f", "{}", "one", None), ToolResult("b", "patch", "*** Begin", '{"code": 1}', None)],
        ),
        ({"messages": MESSAGES}, [ToolResult("a", "Bash", '{"command": "ls"}', "no such file", is_error=True)]),
        ({"messages": CHAT[:4]}, []),
        ({"messages": [*CHAT[:3], {"role": "user", "content": "go on"}, CHAT[3]]}, []),
        (
            {
                "messages": [
                    *CHAT[:3],
                    {"role": "user", "content": "on"},
                    *CHAT[3:5],
                    {"role": "user", "content": "now?"},
                ]
            },
            [ToolResult("a", "f", '{"x": 1}', "one\ntwo", None)],
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "{"}]},
            [ToolResult("a", "Bash", '{"command": "ls"}', "no such file", is_error=True)],
        ),
        (
            {"input": [*RESPONSES, RESPONSES[2] | {"name": "g"}, RESPONSES[4] | {"output": "again"}]},
            [ToolResult("a", "desk__g", "{}", "again", None)],
        ),
        ({"input": "text"}, []),
        ({"messages": [None, {"role": "tool"}, {"type": "function_call_output", "call_id": 1}]}, []),
    ],
)
def test_a_request_brings_the_results_after_the_last_answer(
    request_: dict[str, Any], results: list[ToolResult]
) -> None:
    assert tool_results_in_request(request_) == results


def test_values_of_any_type_are_read_without_an_error() -> None:
    for name, messages in (("messages", CHAT), ("messages", MESSAGES), ("input", RESPONSES)):
        for request in with_other_types({name: messages}):
            results = tool_results_in_request(request)
            assert results_from_json(results_to_json(results)) == results
    answer = {"choices": [_chat(0, "message", "a")], "output": [{"type": "function_call", "call_id": "a"}]}
    for body in with_other_types(answer | {"item": {"type": "tool_use", "id": "a"}}):
        found = list(tool_calls_in_answer(json.dumps(body).encode()))
        assert all(isinstance(choice, int) and isinstance(call_id, str) for choice, call_id in found)


def test_long_texts_of_a_result_are_cut_and_say_so() -> None:
    result = ToolResult.of("a", "f", "x" * 20_000, "y" * 16_384, is_error=None)
    assert (len(result.arguments or ""), (result.arguments or "")[-2:]) == (16_384, "x…")
    assert result.result == "y" * 16_384
    assert results_from_json(results_to_json([result])) == [result]
    for text in ("", "{}", '[{"id": "a"}]', "[1]"):
        with pytest.raises(InvalidRecordError, match="no list of tool results"):
            results_from_json(text)

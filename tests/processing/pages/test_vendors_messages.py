"""What the SDKs of Langfuse, OpenInference and traceloop write of a call, as messages, tools and reasons to leave it out."""

import json
from typing import Any

import pytest

from trainspan_processing.text.chat_messages import chat_messages, tools_of
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.text.model_calls import is_model_call, model_of, text_flaw

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
QUESTION = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}


def langfuse(given: Any, answer: Any, **more: Any) -> dict[str, Any]:
    sides = {"input": given, "output": answer}
    texts = {side: value if isinstance(value, str) else json.dumps(value) for side, value in sides.items()}
    fields = {"type": "generation", **texts, **{name.replace("__", "."): value for name, value in more.items()}}
    return {f"langfuse.observation.{name}": value for name, value in fields.items()}


def openinference(answer: dict[str, Any], raw: dict[str, Any], reason: str | None = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **raw}, "finish_reason": reason}
    return {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "q",
        "llm.output_messages.0.message.role": "assistant",
        **{f"llm.output_messages.0.message.{name}": value for name, value in answer.items()},
        "output.value": json.dumps({"id": "r", "choices": [choice]}),
    }


def conventions(*parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "q"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts}]),
    }


@pytest.mark.parametrize(
    ("given", "answer", "messages"),
    [
        ([QUESTION], {"role": "assistant", "content": "a"}, ["a"]),
        ({"messages": [QUESTION], "tools": [TOOL]}, {"role": "assistant", "content": None, "tool_calls": [CALL]}, [""]),
        ("q", "a b", ["a b"]),
        ("q", "42", ["42"]),
        ([QUESTION], [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], ["a", "b"]),
        ([QUESTION], [QUESTION, {"role": "assistant", "content": "b"}], ["b"]),
        ([QUESTION], {"answer": 1}, []),
    ],
)
def test_a_generation_of_langfuse_has_the_messages_of_its_program(given: Any, answer: Any, messages: list[str]) -> None:
    attributes = langfuse(given, answer, model__name="m")
    asked, answered = messages_of(attributes)
    assert chat_messages(asked) == [QUESTION]
    assert [message["content"] for message in chat_messages(answered)] == messages
    assert (is_model_call(attributes), model_of(attributes)) == (True, "m")
    assert tools_of(attributes) == ([TOOL] if isinstance(given, dict) else [])
    assert text_flaw(attributes, failed=False) == (None if messages else "no_answer")


def test_only_generations_are_calls() -> None:
    attributes = {**langfuse([QUESTION], "a"), "langfuse.observation.type": "span"}
    assert (is_model_call(attributes), messages_of(attributes)) == (False, ([], []))


@pytest.mark.parametrize(
    ("more", "flaw"),
    [
        ({}, None),
        ({"metadata__finish_reason": '"stop"'}, None),
        ({"metadata__finish_reason": '"length"'}, "cut_off"),
        ({"model__parameters": '{"max_tokens": 5}', "usage_details": '{"completion_tokens": 5}'}, "cut_off"),
        ({"model__parameters": '{"max_completion_tokens": 5}', "usage_details": '{"output": 5}'}, "cut_off"),
        ({"model__parameters": '{"max_tokens": 5}', "usage_details": '{"completion_tokens": 4}'}, None),
        ({"model__parameters": '{"max_tokens": "Infinity"}', "usage_details": '{"completion_tokens": 4}'}, None),
    ],
)
def test_a_cut_off_answer_is_known_by_its_tokens_if_nobody_wrote_why_it_ended(
    more: dict[str, Any], flaw: str | None
) -> None:
    assert text_flaw(langfuse([QUESTION], {"role": "assistant", "content": "a"}, **more), failed=False) == flaw


@pytest.mark.parametrize(
    ("answer", "raw", "message", "flaw"),
    [
        ({"content": "a"}, {"content": "a"}, {"content": "a"}, None),
        (
            {"content": "a"},
            {"content": "a", "reasoning_content": "t"},
            {"content": "a", "reasoning_content": "t"},
            None,
        ),
        ({}, {"content": ""}, {"content": ""}, None),
        ({}, {"content": None, "refusal": "no"}, {"content": ""}, "other_parts"),
        ({}, {"content": None}, {"content": ""}, "no_answer"),
    ],
)
def test_what_openinference_leaves_in_the_raw_response_is_read_there(
    answer: dict[str, Any], raw: dict[str, Any], message: dict[str, Any], flaw: str | None
) -> None:
    attributes = openinference(answer, raw)
    assert chat_messages(messages_of(attributes)[1]) == [{"role": "assistant", **message}]
    assert text_flaw(attributes, failed=False) == flaw
    assert text_flaw({**attributes, "llm.finish_reason": "length"}, failed=False) == "cut_off"


def test_a_finish_reason_of_the_raw_response_counts() -> None:
    assert text_flaw(openinference({"content": "a"}, {"content": "a"}, "length"), failed=False) == "cut_off"
    assert text_flaw(openinference({"content": "a"}, {"content": "a"}, None), failed=False) is None


def test_more_than_ten_tools_of_openinference_keep_their_order() -> None:
    tools = {f"llm.tools.{number}.tool.json_schema": json.dumps({"name": f"f{number}"}) for number in range(12)}
    assert [tool["function"]["name"] for tool in tools_of(tools)] == [f"f{number}" for number in range(12)]


@pytest.mark.parametrize(
    ("result", "content", "flaw"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb", None),
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}], "a", "other_parts"),
        ([{"type": "rain", "text": "a"}], '[{"type": "rain", "text": "a"}]', None),
        ([], "[]", None),
    ],
)
def test_content_parts_of_a_tools_result_are_read_like_those_of_a_message(
    result: list[Any], content: str, flaw: str | None
) -> None:
    part = {"type": "tool_call_response", "id": "c", "response": result}
    attributes = conventions({"type": "text", "content": "a"})
    attributes["gen_ai.input.messages"] = json.dumps([{"role": "tool", "parts": [part]}])
    (message,) = chat_messages(messages_of(attributes)[0])
    assert message == {"role": "tool", "content": content, "tool_call_id": "c"}
    assert text_flaw(attributes, failed=False) == flaw


@pytest.mark.parametrize(
    ("parts", "flaw"),
    [
        ([], "no_answer"),
        ([{"type": "text", "content": ""}], None),
        ([{"type": "reasoning", "content": "t"}], None),
        ([{"type": "tool_call", "name": "f", "arguments": {}}], None),
    ],
)
def test_an_answer_with_neither_text_nor_calls_is_none(parts: list[dict[str, Any]], flaw: str | None) -> None:
    assert text_flaw(conventions(*parts), failed=False) == flaw


def test_arguments_that_a_client_has_parsed_are_text_unless_they_are_an_object() -> None:
    calls = [{"type": "tool_call", "name": "f", "arguments": value} for value in ([1, 2], 3, "[1, 2]", None, {"x": 1})]
    (message,) = chat_messages(messages_of(conventions(*calls))[1])
    arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert arguments == ["[1, 2]", "3", "[1, 2]", "", {"x": 1}]

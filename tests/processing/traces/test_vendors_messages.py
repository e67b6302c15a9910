"""What the SDKs of Langfuse, OpenInference and traceloop write of a call, as messages, tools and reasons to leave it out."""

import json
from typing import Any

import pytest

from trainspan_processing.export.conversations import MessageSpan, recorded_calls
from trainspan_processing.text.chat_messages import chat_messages, tools_of
from trainspan_processing.text.dialects import messages_of
from trainspan_processing.text.model_calls import is_model_call, model_of, text_flaw
from trainspan_schemas.telemetry import keys

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
        ([QUESTION], {"answer": 1}, ['{"answer": 1}']),
        ([QUESTION], {"content": "a"}, ["a"]),
        ([QUESTION], {"choices": [{"message": {"role": "assistant", "content": "a"}}]}, ["a"]),
        ([[QUESTION]], {"role": "ai", "content": "a"}, ["a"]),
        ([QUESTION], {}, []),
        ([QUESTION], "null", []),
        ([QUESTION], '{"role": "assistant", "content": "I wi', []),
        ([QUESTION], '[{"role": "assistant", "content": "I wi', []),
        ([QUESTION], '{"role": "assistant", "content": ' + "[" * 3000 + "]" * 3000 + "}", []),
        ([QUESTION], "[a] is the answer", ["[a] is the answer"]),
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
        ({"model__parameters": '{"max_tokens": "5"}', "usage_details": '{"completion_tokens": "5"}'}, "cut_off"),
    ],
)
def test_a_cut_off_answer_is_known_by_its_tokens_if_nobody_wrote_why_it_ended(
    more: dict[str, Any], flaw: str | None
) -> None:
    assert text_flaw(langfuse([QUESTION], {"role": "assistant", "content": "a"}, **more), failed=False) == flaw


def test_a_message_without_a_reason_does_not_hide_that_of_the_metadata() -> None:
    answer = {"role": "assistant", "content": "a", "finish_reason": None}
    assert text_flaw(langfuse([QUESTION], answer, metadata__finish_reason="length"), failed=False) == "cut_off"
    stopped = {**answer, "finish_reason": "stop"}
    assert text_flaw(langfuse([QUESTION], stopped, metadata__finish_reason="length"), failed=False) is None


def test_the_tokens_of_several_choices_do_not_say_that_one_was_cut_off() -> None:
    choice = {"role": "assistant", "content": "a"}
    used = {"model__parameters": '{"max_tokens": 8}', "usage_details": '{"output": 10}'}
    assert text_flaw(langfuse([QUESTION], [choice, choice], **used), failed=False) is None
    assert text_flaw(langfuse([QUESTION], [choice], **used), failed=False) == "cut_off"


ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"x": 1}}}],
}


def _item(text: str, **more: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"instructions": "s", "input": "q"}, [{"role": "system", "content": "s"}, QUESTION]),
        ({"system": "s", "messages": [QUESTION]}, [{"role": "system", "content": "s"}, QUESTION]),
        (
            [QUESTION, ITEM, {"type": "function_call_output", "call_id": "c", "output": "5"}],
            [QUESTION, CALLED, {"role": "tool", "content": "5", "tool_call_id": "c"}],
        ),
        ([QUESTION, _item("a"), ITEM], [QUESTION, {**CALLED, "content": "a"}]),
        (
            [QUESTION, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}],
            [
                QUESTION,
                {**CALLED, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
            ],
        ),
        ([QUESTION, {"role": "tool", "content": TOOL}], [QUESTION]),
        (
            [QUESTION, {"role": "tool", "tool_call_id": "c", "content": {"y": 2}}],
            [QUESTION, {"role": "tool", "tool_call_id": "c", "content": '{"y": 2}'}],
        ),
    ],
)
def test_requests_of_every_kind_are_read_from_a_generations_input(given: Any, messages: list[dict[str, Any]]) -> None:
    attributes = langfuse(given, "a")
    assert chat_messages(messages_of(attributes)[0]) == messages
    assert text_flaw(attributes, failed=False) is None


def test_a_tool_that_langchains_handler_lists_as_a_message_is_an_offered_tool() -> None:
    attributes = langfuse([QUESTION, {"role": "tool", "content": TOOL}], "a")
    assert tools_of(attributes) == [TOOL]


@pytest.mark.parametrize(
    ("answer", "message", "flaw"),
    [
        (ITEM, CALLED, None),
        ([_item("a"), _item("b")], {"role": "assistant", "content": "a\nb"}, None),
        ([_item("a"), ITEM], {**CALLED, "content": "a"}, None),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}, _item("a")],
            {"role": "assistant", "content": "a", "reasoning_content": "t"},
            None,
        ),
        ([_item("a", status="incomplete")], {"role": "assistant", "content": "a"}, "cut_off"),
        ([_item("a"), {"type": "web_search_call"}], {"role": "assistant", "content": ""}, "other_parts"),
    ],
)
def test_the_items_of_one_response_are_one_answer(answer: Any, message: dict[str, Any], flaw: str | None) -> None:
    attributes = langfuse([QUESTION], answer)
    assert chat_messages(messages_of(attributes)[1]) == [message]
    assert text_flaw(attributes, failed=False) == flaw


@pytest.mark.parametrize(
    "item",
    [
        "text",
        {"type": "placeholder", "name": "history"},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": "boom"}]},
        {"role": "assistant", "content": "x", "tool_calls": {"a": 1}},
        {"role": "user", "content": "x", "parts": 5},
        {"role": "user", "content": {"a": 1}},
        {"role": "model", "parts": [{"text": "x"}]},
    ],
)
def test_what_is_no_message_is_counted_and_never_left_out_in_silence(item: Any) -> None:
    assert text_flaw(langfuse([QUESTION, item], "a"), failed=False) == "other_parts"
    attributes = conventions({"type": "text", "content": "a"})
    if isinstance(item, dict) and "role" in item:
        attributes["gen_ai.input.messages"] = json.dumps([QUESTION, item])
        assert text_flaw(attributes, failed=False) == "other_parts"


@pytest.mark.parametrize("given", ['[{"role": "user", "content": "hel', "null", "[" * 3000 + "]" * 3000])
def test_an_input_that_is_cut_empty_or_too_deep_is_no_message(given: str) -> None:
    assert text_flaw(langfuse(given, "a"), failed=False) == "no_messages"


def _span(name: str, parent: str | None, start: int, attributes: dict[str, Any]) -> MessageSpan:
    return MessageSpan("t", name, parent, start, start + 10, False, attributes)


def _answers(*spans: MessageSpan) -> list[str]:
    return [str(call.answer[0]["content"]) for call in recorded_calls(spans) if not isinstance(call.answer, str)]


def _instrumented(answer: str, **more: Any) -> dict[str, Any]:
    return {**conventions({"type": "text", "content": answer}), **more}


def test_a_generation_around_several_calls_is_none_of_them() -> None:
    outer = _span("g", None, 0, langfuse("a long question " * 9, "the final answer " * 9))
    first = _span("a", "g", 1, _instrumented("one"))
    second = _span("b", "g", 20, langfuse([QUESTION], "two"))
    served = _span("s", "g", 40, {"gen_ai.operation.name": "chat", keys.CALL_SERVER: "x"})
    assert _answers(outer, first, second) == ["one", "two"]
    assert _answers(outer, first, served) == ["one"]


def test_a_generation_around_one_call_adds_to_its_record_but_does_not_replace_it() -> None:
    outer = _span("g", None, 0, langfuse([QUESTION] * 9, "cut he"))
    stated = {"gen_ai.response.finish_reasons": ["length"], "gen_ai.agent.name": "planner", "gen_ai.request.model": "m"}
    inner = _instrumented("cut he", **stated)
    (call,) = recorded_calls([outer, _span("a", "g", 1, inner)])
    assert (call.prompt, call.is_whole, call.agent, call.model) == ([QUESTION], False, "planner", "m")
    served = {"gen_ai.operation.name": "chat", keys.CALL_SERVER: "x", **stated}
    (call,) = recorded_calls([outer, _span("s", "g", 1, served)])
    assert (len(call.prompt), call.is_whole, call.agent, call.model) == (9, False, "planner", "m")
    assert call.served_as == ("t", "s")


def test_the_record_that_says_why_the_answer_ended_is_preferred() -> None:
    longer = _instrumented("cut here and more")
    (call,) = recorded_calls(
        [
            _span("a", None, 0, longer),
            _span("b", "a", 1, _instrumented("cut", **{"gen_ai.response.finish_reasons": ["length"]})),
        ]
    )
    assert (call.answer, call.is_whole) == ([{"role": "assistant", "content": "cut"}], False)


def test_a_choice_whose_number_is_no_number_is_the_first() -> None:
    (call,) = recorded_calls([_span("a", None, 0, _instrumented("a", **{keys.CHOICE_INDEX: "x"}))])
    assert call.is_whole


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

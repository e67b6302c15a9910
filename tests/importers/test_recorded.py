"""Messages of other tools' vocabularies, one by one."""

from typing import Any

import pytest

from tests.importers.reading import said
from trainspan_importers.recorded import message_of, messages_in, outputs_in, tools_in

CALL = {"type": "tool_call", "name": "sh", "arguments": "{}", "id": "call_1"}


@pytest.mark.parametrize(
    "fields",
    [
        # An item of the Responses API has an id of its own beside that of the call, by which the result names it.
        {"content": [{"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "sh", "arguments": "{}"}]},
        {"content": [{"type": "tool_use", "id": "call_1", "name": "sh", "input": "{}"}]},
        {"tool_calls": [{"id": "call_1", "function": {"name": "sh", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "call_1", "name": "sh", "args": "{}"}]},
        {
            "content": [{"type": "tool_use", "id": "call_1", "name": "sh", "input": "{}"}],
            "tool_calls": [{"id": "call_1", "name": "sh", "args": "{}"}],
        },
    ],
)
def test_a_tool_call_has_the_id_that_its_result_names_and_counts_once(fields: dict[str, Any]) -> None:
    assert message_of({"role": "assistant", **fields}) == said("assistant", CALL)


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "user", "content": [{"type": "tool_result", "id": "x", "tool_use_id": "call_1", "content": "no"}]},
        {"role": "user", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "no"}]},
        {"role": "tool", "id": "x", "tool_call_id": "call_1", "content": "no"},
    ],
)
def test_a_tools_result_names_its_call(fields: dict[str, Any]) -> None:
    (part,) = message_of(fields)["parts"]
    assert part == {"type": "tool_call_response", "response": "no", "id": "call_1"}


def test_a_message_keeps_its_authors_name_but_a_tools_name_is_that_of_its_call() -> None:
    assert message_of({"role": "user", "name": "ada", "content": "hi"}) == said("user", "hi", name="ada")
    assert "name" not in message_of({"role": "tool", "name": "sh", "tool_call_id": "call_1", "content": "no"})


def _assistant(text: str, **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_the_last_message_of_a_response_is_the_answer_but_choices_are_all_answers() -> None:
    first, last = (said("assistant", {"type": "text", "content": text}) for text in "ab")
    assert outputs_in([_assistant("a"), _assistant("b")]) == [first, last]
    assert outputs_in([_assistant("a", type="message"), _assistant("b", type="message")]) == [last]


def test_an_item_that_is_no_message_stays_as_an_unknown_part() -> None:
    item = {"type": "function_call", "name": "f"}
    unknown = {"type": "unknown", "item": item}
    assert messages_in([_assistant("a"), item]) == [
        said("assistant", {"type": "text", "content": "a"}),
        said("user", unknown),
    ]
    assert outputs_in([_assistant("a"), item]) == [said("assistant", unknown)]


def test_a_tool_listed_as_a_message_is_an_offered_tool() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    listed = [_assistant("a"), {"role": "tool", "content": tool}]
    assert [message["role"] for message in messages_in(listed)] == ["assistant"]
    assert tools_in(listed) == [tool]

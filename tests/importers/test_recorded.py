"""Messages of other tools' vocabularies, one by one."""

from typing import Any

import pytest

from tests.importers.reading import said
from trainspan_importers.recorded import message_of

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

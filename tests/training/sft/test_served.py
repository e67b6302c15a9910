"""Tools that a client recorded are completed by what the policy server rendered of them, and never replaced by others."""

from typing import Any

import pytest

from trainspan_training.sft.data.examples import Example, served_tool
from trainspan_training.sft.data.served import StoredPrompt, with_served_tools

PARAMETERS = {"type": "object"}
SERVED = {"name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}


def tool(**function: Any) -> Any:
    return served_tool({"type": "function", "function": function})


@pytest.mark.parametrize(
    ("recorded", "is_completed"),
    [
        ({"name": "add", "description": "adds", "parameters": PARAMETERS}, True),
        ({"name": "add"}, True),
        ({"name": "add", "description": "adds two numbers", "parameters": PARAMETERS}, False),
        ({"name": "subtract", "description": "adds", "parameters": PARAMETERS}, False),
        (SERVED, False),
    ],
)
def test_a_tool_is_completed_only_by_one_that_says_the_same(recorded: dict[str, Any], is_completed: bool) -> None:
    example = Example("e", tools=(tool(**recorded),))
    prompt = StoredPrompt("p", (), (tool(**SERVED),), ())
    (made,), changed = with_served_tools([example], [prompt])
    assert changed == is_completed
    assert made.tools == ((tool(**SERVED),) if is_completed else example.tools)

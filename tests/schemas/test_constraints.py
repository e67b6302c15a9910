from typing import Any

import pytest

from trainspan_schemas.constraints import is_constrained

NAMED = {"type": "function", "function": {"name": "search"}}


@pytest.mark.parametrize(
    "request_",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED},
        {"function_call": {"name": "search"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"response_format": "<class 'Answer'>"},
        {"logit_bias": {"5": -100}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_regex": "[0-9]+"},
        {"min_tokens": 4},
    ],
)
def test_what_limits_the_tokens_is_a_constraint(request_: dict[str, Any]) -> None:
    assert is_constrained({"temperature": 1.0, **request_})


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"tools": [NAMED], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": None, "response_format": None, "logit_bias": None},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}, "min_tokens": 0, "stop": ["\n"], "max_tokens": 8},
    ],
)
def test_what_leaves_every_token_possible_is_none(request_: dict[str, Any]) -> None:
    assert not is_constrained(request_)

import json
from dataclasses import replace
from typing import Any

import pytest

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.constraints import Constraint, Grammar, is_constrained, obstacle_of

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


WHOLE = Constraint(
    grammar=Grammar("choice", "ebnf", 'root ::= "é" | "no"', "xgrammar", "0.2.8", 320, (2, 7), False),
    allowed_ids=(1, 2),
    biases=((4, -100.0), (5, 1.5)),
    bad_words=((1,), (2, 3)),
    others=("min_tokens",),
)


@pytest.mark.parametrize(
    "constraint", [WHOLE, Constraint(), Constraint(allowed_ids=()), Constraint(others=("tokenizer",))]
)
def test_a_record_is_read_as_it_was_written(constraint: Constraint) -> None:
    assert Constraint.from_json(constraint.to_json()) == constraint
    assert (
        Constraint.from_json(json.dumps(json.loads(constraint.to_json()), indent=1)).to_json() == constraint.to_json()
    )


def test_a_record_leaves_empty_parts_out() -> None:
    assert Constraint().to_json() == "{}"
    assert Constraint(allowed_ids=()).to_json() == '{"allowed_token_ids":[]}'
    assert Constraint(biases=((4, 1.5),), bad_words=((1,),)).to_json() == '{"bad_words":[[1]],"logit_bias":[[4,1.5]]}'


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[]",
            "null",
            '{"grammar":{}}',
            '{"grammar":[]}',
            '{"allowed_token_ids":[-1]}',
            '{"bad_words":[[true]]}',
        ),
        *('{"logit_bias":[[1]]}', '{"allowed_token_ids":["1"]}', '{"logit_bias":[[4294967296,1]]}', "[" * 100_000),
        *('{"others":["<b>"]}', '{"others":[[]]}', WHOLE.to_json().replace("xgrammar", "x"), " " * 300_000 + "{}"),
        *('{"logit_bias":[[1,NaN]]}', '{"logit_bias":[[1,Infinity]]}', '{"logit_bias":[[1,"x"]]}'),
    ],
)
def test_what_is_no_record_is_refused_and_an_obstacle(text: str) -> None:
    with pytest.raises(InvalidRecordError):
        Constraint.from_json(text)
    assert obstacle_of(True, text) == "constrained"


def test_what_cannot_be_replayed_is_named() -> None:
    assert WHOLE.kinds == ["choice", "allowed_token_ids", "logit_bias", "bad_words", "min_tokens"]
    assert obstacle_of(True, WHOLE.to_json()) == "constrained:min_tokens"
    assert WHOLE.grammar
    other = Constraint(replace(WHOLE.grammar, library="outlines"))
    assert obstacle_of(True, other.to_json()) == "constrained:outlines_choice"
    assert obstacle_of(True, replace(WHOLE, others=()).to_json()) is None
    assert (obstacle_of(True, None), obstacle_of(False, None), obstacle_of(None, None)) == ("constrained", None, None)

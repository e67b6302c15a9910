"""Span attributes promoted to columns, so that readers need not search the text."""

import json
from itertools import count
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector.process import CollectorProcess, export, key_values, read, span
from trainspan_schemas.telemetry import keys

TOKENS = {keys.PROMPT_TOKEN_IDS: [1, 2], keys.COMPLETION_TOKEN_IDS: [3]}
FACTS = ["operation", "request_model", "response_id", "state_key", "policy_version_spans", "redacted", "call_facts"]


_traces = count(1)


def _stored(collector: CollectorProcess, attributes: dict[str, Any], name: str = "spans") -> dict[str, Any]:
    return _read(collector, span(next(_traces), 1, attributes), name)


def _read(collector: CollectorProcess, sent: Span, name: str = "spans") -> dict[str, Any]:
    export(collector.address, sent)
    [row] = [row for row in read(collector.address, name) if row["trace_id"] == sent.trace_id.hex()]
    return row


def test_a_calls_facts_are_columns_and_stay_attributes(collector: CollectorProcess) -> None:
    said = {
        keys.GEN_AI_OPERATION: "chat",
        keys.GEN_AI_REQUEST_MODEL: "policy",
        keys.GEN_AI_RESPONSE_ID: "chatcmpl-1",
        keys.STATE_KEY: "room 3",
        keys.POLICY_VERSION_SPANS: "[[0,0,1]]",
        keys.GEN_AI_TOP_P: 0.5,
        keys.GEN_AI_TEMPERATURE: "1.0",
        keys.CHOICE_INDEX: 0,
        keys.SAMPLING_CONSTRAINED: False,
        "other": "x",
    }
    row = _stored(collector, said | TOKENS)
    assert {name: row[name] for name in FACTS} == {
        "operation": "chat",
        "request_model": "policy",
        "response_id": "chatcmpl-1",
        "state_key": "room 3",
        "policy_version_spans": "[[0,0,1]]",
        "redacted": None,
        "call_facts": (
            '{"trainspan.choice.index":0,"gen_ai.request.temperature":"1.0","gen_ai.request.top_p":0.5,'
            '"trainspan.sampling.constrained":false}'
        ),
    }
    assert row["attribute_keys"] == "".join(f"\n{key}" for key in said) + "\n"
    assert json.loads(row["attributes"]) == said
    call = _stored(collector, said | TOKENS, "calls")
    assert {name: call[name] for name in [*FACTS, "attribute_keys"]} == {
        name: row[name] for name in [*FACTS, "attribute_keys"]
    }


def test_what_is_no_call_has_no_call_facts(collector: CollectorProcess) -> None:
    row = _stored(collector, {keys.GEN_AI_OPERATION: "chat", keys.GEN_AI_TOP_P: 0.5})
    assert (row["operation"], row["call_facts"]) == ("chat", None)
    assert row["attribute_keys"] == "\ngen_ai.operation.name\ngen_ai.request.top_p\n"


@pytest.mark.parametrize("value", ["", 5, True, ["chat"], {"a": "b"}])
def test_a_fact_of_another_type_is_absent(collector: CollectorProcess, value: Any) -> None:
    wrong = dict.fromkeys(
        [keys.GEN_AI_OPERATION, keys.GEN_AI_RESPONSE_ID, keys.STATE_KEY, keys.POLICY_VERSION_SPANS], value
    )
    row = _stored(collector, wrong | {keys.REDACTED: "trainspan.x"} | TOKENS)
    assert [row[name] for name in FACTS] == [None] * len(FACTS)


def test_of_a_key_that_stands_twice_the_last_counts(collector: CollectorProcess) -> None:
    twice = span(next(_traces), 1)
    for model in ("first", "last"):
        twice.attributes.extend(key_values({keys.GEN_AI_REQUEST_MODEL: model}))
    row = _read(collector, twice)
    assert (row["request_model"], row["attribute_keys"]) == ("last", "\ngen_ai.request.model\n")


def test_keys_that_were_removed_are_a_fact_as_json(collector: CollectorProcess) -> None:
    row = _stored(collector, {keys.REDACTED: ["gen_ai.request.top_p", 'a"]b']})
    assert json.loads(row["redacted"]) == ["gen_ai.request.top_p", 'a"]b']


def test_equal_numbers_of_other_types_and_long_values_keep_their_own_text(collector: CollectorProcess) -> None:
    for value, text in ((1, "1"), (1.0, "1.0"), (True, "true"), ("1", '"1"'), ("x" * 5_000, f'"{"x" * 5_000}"')) * 2:
        row = _stored(collector, {keys.CHOICE_INDEX: value} | TOKENS)
        assert row["call_facts"] == f'{{"{keys.CHOICE_INDEX}":{text}}}'


def test_a_span_without_attributes_has_no_keys(collector: CollectorProcess) -> None:
    row = _stored(collector, {})
    assert (row["attributes"], row["attribute_keys"]) == ("{}", "\n\n")

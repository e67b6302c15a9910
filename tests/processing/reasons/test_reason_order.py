"""Each reason by what it is found from, and which of several is given, on plain values."""

from typing import Any

import polars as pl
import pytest

from trainspan_processing.reasons.drop_reasons import (
    admitted_reasons,
    call_reason,
    early_reason,
    judged_others,
    rollout_reason,
)
from trainspan_processing.tables import CALLS
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys

Row = dict[str, Any]

EARLY: list[tuple[str, Row]] = [
    ("not_selected", {"selected": False}),
    ("validation", {"split": "val"}),
    ("superseded_by_retry", {"superseded": True}),
    ("id_collision", {"collides": True}),
    ("attempt_conflict", {"conflicts": True}),
    ("unfinished", {"complete": False}),
]
ROLLOUT = [
    *EARLY,
    ("timeout", {"status": "timeout", "teaches": False}),
    ("judge_error", {"reward_failed": True}),
    ("reward_unclear", {"reward_unclear": True}),
    ("reward_out_of_range", {"reward_outside": True}),
    ("untrusted_reward", {"reward": None, "reward_untrusted": True}),
    ("invalid_reward", {"reward_invalid": True}),
    ("no_reward", {"reward": None}),
]
SOUND_ROLLOUT: Row = {
    "selected": True,
    "split": "train",
    "superseded": False,
    "collides": False,
    "conflicts": False,
    "complete": True,
    "status": "ok",
    "teaches": True,
    "reward_failed": False,
    "reward_unclear": False,
    "reward_outside": False,
    "reward": 0.5,
    "reward_untrusted": False,
    "reward_invalid": False,
}
WHOSE: list[tuple[str, Row]] = [
    ("internal", {"internal": True}),
    ("forced", {"forced": True}),
    ("no_boundary", {"no_boundary": True}),
    ("no_rollout", {"rollout_id": None}),
    ("not_selected", {"selected": False}),
    ("other_policy", {"other_policy": True}),
    ("untrusted", {"untrusted": True}),
    ("unsigned", {"is_unsigned": True}),
    ("title", {"call_kind": "title"}),
    ("timeout", {"rollout_reason": "timeout"}),
]
CALL = [
    *WHOSE,
    ("redacted", {"redacted": True}),
    ("ended_by_server", {"finish_reason": keys.ENDED_BY_SERVER}),
    ("incomplete", {"finish_reason": "abort"}),
    ("overlong", {"finish_reason": "length"}),
    ("not_delivered", {"delivered": False}),
    ("attributes_dropped", {"dropped_attributes": 1}),
    ("multimodal", {"multimodal": True}),
    ("constrained:tokenizer", {"obstacle": "constrained:tokenizer"}),
    ("greedy", {"temperature": 0.0}),
    ("sampling_truncated", {"top_p": 0.9}),
    ("unstated_sampling", {"sampling_unstated": True}),
]
SOUND_CALL: Row = {
    "rollout_id": "r",
    "selected": True,
    "finish_reason": "stop",
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "delivered": True,
}
OF_INDEX = {"rollout_reason": pl.String, "selected": pl.Boolean, "other_policy": pl.Boolean, "is_unsigned": pl.Boolean}


def _of_call(change: Row, expression: pl.Expr) -> Any:
    schema = {**CALLS, **OF_INDEX}
    row = SOUND_CALL | change
    return pl.DataFrame([{name: row.get(name) for name in schema}], schema=schema).select(expression).item()


def _of_rollout(change: Row, expression: pl.Expr) -> Any:
    return pl.DataFrame([SOUND_ROLLOUT | change], schema_overrides={"reward": pl.Float64}).select(expression).item()


def _with_those_after(rules: list[tuple[str, Row]], place: int) -> Row:
    """The change of a rule and of all rules after it, as far as they can be had together."""
    changes: Row = {}
    for _, change in reversed(rules[place:]):
        changes |= change
    return changes


def test_a_sound_call_of_a_sound_rollout_has_no_reason() -> None:
    assert _of_rollout({}, early_reason()) is None
    assert _of_rollout({}, rollout_reason()) is None
    assert _of_call({}, call_reason(mask_overlong=True)) is None


@pytest.mark.parametrize("place", range(len(ROLLOUT)))
def test_a_rollout_has_the_first_reason_that_applies(place: int) -> None:
    name, change = ROLLOUT[place]
    assert _of_rollout(change, rollout_reason()) == name
    assert _of_rollout(_with_those_after(ROLLOUT, place), rollout_reason()) == name
    assert _of_rollout(change, early_reason()) == (name if ROLLOUT[place] in EARLY else None)


def test_a_failed_rollout_with_a_reward_teaches_and_an_untrusted_reward_beside_a_trusted_one_is_nothing() -> None:
    assert _of_rollout({"status": "timeout"}, rollout_reason()) is None
    assert _of_rollout({"reward_untrusted": True}, rollout_reason()) is None


@pytest.mark.parametrize("place", range(len(CALL)))
def test_a_call_has_the_first_reason_that_applies(place: int) -> None:
    name, change = CALL[place]
    assert _of_call(change, call_reason(mask_overlong=True)) == name
    assert _of_call(_with_those_after(CALL, place), call_reason(mask_overlong=True)) == name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(({"finish_reason": why}, "incomplete") for why in ("cancelled", "error", "incomplete", None)),
        ({"finish_reason": "tool_calls"}, None),
        ({"finish_reason": "length"}, None),  # unless such calls are masked
        ({"temperature": 1e-6}, "greedy"),
        ({"temperature": 1e-5}, None),
        ({"top_k": 1.0}, "sampling_truncated"),
        ({"top_k": -1.0}, None),
        ({"top_k": float((1 << 20) - 1)}, "sampling_truncated"),
        ({"top_k": float(1 << 20)}, None),
        ({"min_p": 0.01}, "sampling_truncated"),
        ({"frequency_penalty": -0.1}, "sampling_truncated"),
        ({"presence_penalty": 0.1}, "sampling_truncated"),
        ({"repetition_penalty": 1.1}, "sampling_truncated"),
        ({"repetition_penalty": 0.9}, "sampling_truncated"),
        ({"dropped_attributes": 0}, None),
        ({"call_kind": "agent"}, None),
    ],
)
def test_how_a_call_was_sampled_and_ended(change: Row, reason: str | None) -> None:
    assert _of_call(change, call_reason()) == reason


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"untrusted": True}, "untrusted"),
        ({"is_unsigned": True}, "unsigned"),
        ({"call_kind": "title"}, "title"),
        ({"sampling_unstated": True}, "unstated_sampling"),
    ],
)
def test_what_the_user_admits_is_no_reason_and_everything_else_still_is(change: Row, name: str) -> None:
    admitted = admitted_reasons(f" {name} ,untrusted_reward,")
    assert admitted == {name, "untrusted_reward"}
    assert _of_call(change, call_reason()) == name
    assert _of_call(change, call_reason(admitted)) is None
    assert _of_call({**change, "redacted": True}, call_reason(admitted)) == "redacted"
    assert _of_call({**change, "internal": True}, call_reason(admitted)) == "internal"


def test_a_reason_that_no_user_can_admit_is_refused_by_name() -> None:
    assert admitted_reasons(None) == frozenset()
    with pytest.raises(UsageError, match="admit = 'greedy' is not admissible: use one of unsigned, title"):
        admitted_reasons("title,greedy")


@pytest.mark.parametrize(
    ("change", "any_call", "reason"),
    [
        ({}, True, "not_selected"),  # of a foreign model
        ({}, False, "no_token_ids"),
        ({"is_bare_call": True}, True, "no_token_ids"),
        ({"is_bare_call": True, "rollout_reason": "no_reward"}, True, "no_reward"),
        ({"is_bare_call": True, "rollout_id": None}, True, "no_rollout"),
        ({"is_bare_call": True, "rollout_id": None, "redacted": True}, True, "redacted"),
        ({"redacted": True}, True, "not_selected"),
    ],
)
def test_a_call_without_tokens_is_named(change: Row, any_call: bool, reason: str) -> None:
    row: Row = {"rollout_id": "r", "attempt": 0, "trace_id": "t", "span_id": "s", "agent": "a", "redacted": None}
    row |= {"is_bare_call": False, "rollout_reason": None} | change
    others = pl.DataFrame([row], schema_overrides={"redacted": pl.Boolean, "rollout_reason": pl.String})
    judged = judged_others(others, any_call=any_call).to_dicts()
    named = ("rollout_id", "attempt", "trace_id", "span_id", "agent")
    assert judged == [{**{name: row[name] for name in named}, "reason": reason}]

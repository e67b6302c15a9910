"""Credit rules, worked by hand, and their laws."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspan_processing.credit.rules import CREDITS

Rollout = tuple[float | None, list[float | None]]


def _calls(rollouts: list[Rollout], requests: list[int] | None = None) -> pl.DataFrame:
    rows = [
        (number, position, step, whole)
        for number, (whole, steps) in enumerate(rollouts)
        for position, step in enumerate(steps)
    ]
    schema = {"rollout": pl.UInt32, "position": pl.UInt32, "step_reward": pl.Float64, "rollout_reward": pl.Float64}
    calls = pl.DataFrame(rows, schema=schema, orient="row")
    return calls.with_columns(
        (pl.col("position") + 1).alias("request") if requests is None else pl.Series("request", requests)
    )


def _returns(name: str, rollouts: list[Rollout], gamma: float = 1.0, requests: list[int] | None = None) -> list[float]:
    return CREDITS[name](_calls(rollouts, requests), gamma).sort("rollout", "position")["return"].to_list()


def test_identical_gives_every_call_the_return_of_its_rollout() -> None:
    assert _returns("identical", [(1.0, [None, 0.5, None]), (None, [2.0]), (3.0, [None])]) == [1.5, 1.5, 1.5, 2.0, 3.0]


def test_return_to_go_sums_what_comes_after_and_puts_the_rollouts_reward_on_its_last_call() -> None:
    assert _returns("return_to_go", [(1.0, [0.5, None, 0.25]), (2.0, [1.0])]) == [1.75, 1.25, 1.25, 3.0]


def test_return_to_go_discounts_per_call() -> None:
    # last: 1; before it: 0 + .5·1; first: .5 + .5·.5
    assert _returns("return_to_go", [(1.0, [0.5, None, None]), (4.0, [None])], 0.5) == [0.75, 0.5, 1.0, 4.0]


def test_step_gives_each_call_its_own_reward_and_none_to_a_call_without_one() -> None:
    assert _returns("step", [(1.0, [0.5, None, 0.25]), (None, [0.0, None])]) == [0.5, None, 1.25, 0.0, None]


def test_choices_of_one_request_are_one_step_and_none_has_the_rewards_of_its_siblings() -> None:
    choices: list[Rollout] = [(4.0, [0.1, 0.2, None, 1.0, None])]
    requests = [1, 1, 1, 2, 2]
    assert _returns("return_to_go", choices, 1.0, requests) == pytest.approx([5.1, 5.2, 5.0, 5.0, 4.0])
    assert _returns("return_to_go", choices, 0.5, requests) == pytest.approx([2.6, 2.7, 2.5, 5.0, 4.0])
    assert _returns("step", choices, 1.0, requests) == [0.1, 0.2, None, 5.0, 4.0]
    assert _returns("identical", choices, 1.0, requests) == pytest.approx([5.3] * 5)


def test_a_discount_does_not_vanish_over_a_thousand_calls() -> None:
    returns = _returns("return_to_go", [(1.0, [1.0] * 1_000)], 0.5)
    assert returns[0] == pytest.approx(2.0)
    assert returns[-1] == 2.0


_ROLLOUTS = st.lists(
    st.tuples(st.floats(-9, 9) | st.none(), st.lists(st.floats(-9, 9) | st.none(), min_size=1, max_size=6)),
    min_size=1,
    max_size=4,
)


@given(_ROLLOUTS)
def test_credit_of_the_first_call_sums_to_the_return(rollouts: list[Rollout]) -> None:
    first = [position for _, steps in rollouts for position in range(len(steps))]
    to_go = [value for value, position in zip(_returns("return_to_go", rollouts), first, strict=True) if position == 0]
    whole = [value for value, position in zip(_returns("identical", rollouts), first, strict=True) if position == 0]
    steps = [sum(step or 0.0 for step in steps) + (whole or 0.0) for whole, steps in rollouts]
    assert to_go == pytest.approx(whole)
    assert steps == pytest.approx(whole)


@given(_ROLLOUTS, st.sampled_from(sorted(CREDITS)))
def test_the_order_of_rows_changes_nothing(rollouts: list[Rollout], name: str) -> None:
    calls = _calls(rollouts)
    shuffled = calls.sample(fraction=1.0, shuffle=True, seed=3)
    key = ["rollout", "position"]
    expected, actual = (CREDITS[name](frame, 0.9).sort(key)["return"].to_list() for frame in (calls, shuffled))
    assert actual == pytest.approx(expected)

"""Changes that must not affect the advantages."""

import dataclasses

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.processing.support.estimates import Rollout, advantages, estimate
from trainspan_processing.credit.baselines import BASELINES, WITH_GROUPS

_FEW = settings(max_examples=40)
_REWARD = st.sampled_from([0.0, 0.25, 1.0])
_STEPS = st.lists(st.sampled_from([None, 0.0, 0.5, -1.0]), min_size=1, max_size=4)
_ESTIMATORS = [
    {"credit": "identical"},
    {"credit": "return_to_go", "gamma": 0.9},
    {"credit": "step"},
    {"credit": "step", "step_by": "agent"},
    {"credit": "gigpo", "gamma": 0.5},
    {"credit": "rtmc", "gamma": 0.5},
    {"credit": "identical", "group_over": "calls"},
    {"credit": "return_to_go", "group_over": "turns"},
    {"credit": "per_agent", "agent_credit": "a=rloo,b=return_to_go+rae"},
    {"credit": "identical", "combine": "gdpo", "reward_name": "reward,style?=0.5"},
]


@st.composite
def _rollout(draw: st.DrawFn) -> Rollout:
    steps = draw(_STEPS)
    letters = st.sampled_from("ab")
    return Rollout(
        draw(_REWARD),
        list(steps),
        agents="".join(draw(letters) for _ in steps),
        states="".join(draw(letters) for _ in steps),
        actions="".join(draw(letters) for _ in steps),
        group=draw(st.integers(0, 2)),
        more={"style": (draw(_REWARD | st.none()), [None] * len(steps))},
    )


_ROLLOUTS = st.lists(_rollout(), min_size=1, max_size=9)


def _has_meaning(estimator: dict[str, str], baseline: str) -> bool:
    """Whether the pair is valid (test_advantages.py tests the refusals)."""
    if estimator["credit"] == "gigpo":
        return baseline in WITH_GROUPS
    if estimator["credit"] == "rtmc":
        return baseline == "dr_grpo"
    return not (estimator.get("group_over") == "calls" and baseline in ("running", "rae"))


@_FEW
@given(_ROLLOUTS, st.sampled_from(sorted(BASELINES)))
def test_a_rollout_with_more_calls_weighs_no_more(rollouts: list[Rollout], baseline: str) -> None:
    """Duplicating the rows of some rollouts leaves all advantages unchanged."""
    doubled = [
        Rollout(
            rollout.reward, [*rollout.steps, *([None] * len(rollout.steps) if number % 2 else [])], group=rollout.group
        )
        for number, rollout in enumerate(rollouts)
    ]
    plain = [Rollout(rollout.reward, rollout.steps, group=rollout.group) for rollout in rollouts]

    def of_rollouts(given: list[Rollout]) -> dict[int, float]:
        calls = estimate(given, baseline=baseline).calls
        found = calls.group_by("rollout").agg(pl.col("advantage").n_unique().alias("n"), pl.col("advantage").first())
        assert found["n"].to_list() == [1] * found.height
        return dict(found.select("rollout", "advantage").iter_rows())

    assert of_rollouts(doubled) == of_rollouts(plain)


@_FEW
@given(_ROLLOUTS, st.sampled_from(_ESTIMATORS), st.sampled_from(sorted(BASELINES)))
def test_the_order_of_rows_changes_nothing(rollouts: list[Rollout], estimator: dict[str, str], baseline: str) -> None:
    assume(_has_meaning(estimator, baseline))
    in_order = advantages(rollouts, baseline=baseline, **estimator)
    assert advantages(rollouts, baseline=baseline, shuffled=True, **estimator) == in_order


@_FEW
@given(_ROLLOUTS, st.sampled_from(_ESTIMATORS), st.sampled_from(sorted(BASELINES)))
def test_what_says_nothing_has_advantage_zero_and_all_are_finite(
    rollouts: list[Rollout], estimator: dict[str, str], baseline: str
) -> None:
    assume(_has_meaning(estimator, baseline))
    calls = estimate(rollouts, baseline=baseline, **estimator).calls
    assert calls["advantage"].is_finite().all()
    if estimator.get("combine") != "gdpo":  # its last step shifts all of them by the batch's mean
        assert calls.filter(pl.col("drop").is_not_null())["advantage"].unique().to_list() in ([], [0.0])


@_FEW
@given(_ROLLOUTS, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_no_comparison(rollouts: list[Rollout], constant: float) -> None:
    shifted = [Rollout((rollout.reward or 0.0) + constant, rollout.steps, group=rollout.group) for rollout in rollouts]
    plain = [Rollout(rollout.reward, rollout.steps, group=rollout.group) for rollout in rollouts]
    for baseline in ("dr_grpo", "rloo"):
        assert advantages(shifted, baseline=baseline) == pytest.approx(advantages(plain, baseline=baseline), abs=1e-9)


@_FEW
@given(_ROLLOUTS)
def test_with_one_agent_per_agent_is_identical(rollouts: list[Rollout]) -> None:
    plain = [Rollout(rollout.reward, rollout.steps, group=rollout.group) for rollout in rollouts]
    assert advantages(plain, credit="per_agent", baseline="grpo") == advantages(plain, baseline="grpo")


@_FEW
@given(_ROLLOUTS)
def test_gigpo_without_its_state_term_is_grpo(rollouts: list[Rollout]) -> None:
    assert advantages(rollouts, credit="gigpo", state_weight=0.0) == pytest.approx(advantages(rollouts))


@_FEW
@given(_ROLLOUTS, st.data(), st.sampled_from(["turn", "agent"]), st.sampled_from(["running", "rloo"]))
def test_what_a_rollout_earned_is_no_part_of_what_its_calls_are_compared_with(
    rollouts: list[Rollout], data: st.DataObject, step_by: str, baseline: str
) -> None:
    """Different rewards of its calls leave their centers unchanged, if both versions are compared."""
    number = data.draw(st.integers(0, len(rollouts) - 1))
    richer = [*rollouts]
    richer[number] = dataclasses.replace(
        rollouts[number],
        steps=[None if step is None else step + 3.0 + place for place, step in enumerate(rollouts[number].steps)],
    )
    before, after = (
        estimate(given, credit="step", step_by=step_by, baseline=baseline).terms.filter(pl.col("rollout") == number)
        for given in (rollouts, richer)
    )
    both = before.join(after, on=["rollout", "position"]).filter(
        pl.col("drop").is_null() & pl.col("drop_right").is_null()
    )
    assert both["center"].to_list() == pytest.approx(both["center_right"].to_list(), abs=1e-9)


@_FEW
@given(_ROLLOUTS, st.sampled_from(_ESTIMATORS), st.sampled_from(sorted(BASELINES)), st.data())
def test_rewards_that_differ_by_rounding_alone_are_equal(
    rollouts: list[Rollout], estimator: dict[str, str], baseline: str, data: st.DataObject
) -> None:
    """Changing only the last digits of rewards gives the same advantages as equal rewards, and the same reasons."""
    assume(_has_meaning(estimator, baseline))
    assume(estimator.get("combine") != "gdpo")
    digits = st.sampled_from([-4e-16, 0.0, 4e-16])
    moved = [
        dataclasses.replace(rollout, reward=(rollout.reward or 0.0) * (1.0 + data.draw(digits))) for rollout in rollouts
    ]
    exact, rounded = (
        estimate(given, baseline=baseline, **estimator).calls.sort("rollout", "position") for given in (rollouts, moved)
    )
    assert rounded["advantage"].to_list() == pytest.approx(exact["advantage"].to_list(), abs=1e-6)
    assert rounded["drop"].to_list() == exact["drop"].to_list()

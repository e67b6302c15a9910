"""Credit from measured values of states: worked by hand, its laws, and its bias and variance on an agent with known values."""

import random
import statistics

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processing.support.estimates import Rollout, advantages, estimate
from trainspan_processing.credit.plan import make_plan
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

VINE = {"credit": "vine", "baseline": "dr_grpo"}


def test_the_advantage_of_a_call_is_the_value_after_it_less_the_value_before_it() -> None:
    # Group: R = 1, 0, so V(s_0) = .5. States before the calls of the first: .5, .75, .25, then R = 1.
    rollouts = [Rollout(1.0, [None] * 3, values=[None, 0.75, 0.25]), Rollout(0.0, [None] * 2, values=[None, 0.0])]
    assert advantages(rollouts, **VINE) == [0.25, -0.5, 0.75, -0.5, 0.0]


def test_calls_without_a_value_between_them_count_as_one() -> None:
    # Only V(s_2) = .9 of four calls is known: calls 0 and 1 make .9 − .5, calls 2 and 3 make 1 − .9.
    rollouts = [Rollout(1.0, [None] * 4, values=[None, None, 0.9, None]), Rollout(0.0, [None])]
    assert advantages(rollouts, **VINE) == pytest.approx([0.4, 0.4, 0.1, 0.1, -0.5])


def test_without_measured_values_it_is_identical_with_the_same_baseline() -> None:
    rollouts = [Rollout(1.0, [0.5, None]), Rollout(0.25, [None]), Rollout(0.0, [None] * 3)]
    for baseline in ("dr_grpo", "rloo", "running"):
        vine = advantages(rollouts, credit="vine", baseline=baseline)
        assert vine == pytest.approx(advantages(rollouts, credit="identical", baseline=baseline))


def test_a_measured_first_state_replaces_the_groups_mean() -> None:
    rollouts = [Rollout(1.0, [None, None], values=[0.2, 0.6]), Rollout(0.0, [None])]
    assert advantages(rollouts, **VINE) == pytest.approx([0.4, 0.4, -0.5])


def test_a_group_of_equal_rewards_still_teaches_what_its_branches_measured() -> None:
    rollouts = [Rollout(1.0, [None, None], values=[None, 0.25]), Rollout(1.0, [None, None])]
    found = estimate(rollouts, **VINE).calls.sort("rollout", "position")
    # V(s_0) = 1, the mean: the first call spoiled it, the second one saved it.
    assert found["advantage"].to_list() == [-0.75, 0.75, 0.0, 0.0]
    assert found["drop"].to_list() == [None, None, "zero_spread_group", "zero_spread_group"]


def test_a_rollout_without_a_group_is_trained_after_its_first_measured_state() -> None:
    found = estimate([Rollout(1.0, [None] * 3, values=[None, 0.5, None])], **VINE).calls
    assert found["advantage"].to_list() == [0.0, 0.5, 0.5]
    assert found["drop"].to_list() == ["singleton_group", None, None]


def test_what_measured_values_cannot_be_combined_with_is_refused() -> None:
    for baseline in ("grpo", "batch", "global", "none"):
        with pytest.raises(UsageError, match=f"which baseline '{baseline}' does not keep: use baseline dr_grpo, rloo"):
            make_plan(DatasetSettings(credit="vine", baseline=baseline), has_tasks=True)
    for other in ({"combine": "gdpo"}, {"group_over": "turns"}):
        with pytest.raises(UsageError, match="leave agent_credit, combine and group_over at their defaults"):
            make_plan(DatasetSettings(**VINE, **other), has_tasks=True)
    with pytest.raises(UsageError, match="leave agent_credit"):
        make_plan(DatasetSettings(credit="per_agent", agent_credit="a=vine+rloo", baseline="rloo"), has_tasks=True)
    assert make_plan(DatasetSettings(credit="vine"), has_tasks=True).estimator.baseline == "dr_grpo"
    assert make_plan(DatasetSettings(credit="vine"), has_tasks=False).estimator.baseline == "running"


_VALUE = st.none() | st.floats(0, 1).map(lambda value: round(value, 3))


@settings(max_examples=60)
@given(st.data())
def test_the_advantages_of_a_rollouts_blocks_add_up_to_its_reward_less_the_value_of_its_start(
    data: st.DataObject,
) -> None:
    rollouts = []
    for _ in range(data.draw(st.integers(2, 4))):
        values = data.draw(st.lists(_VALUE, min_size=1, max_size=6))
        rollouts.append(Rollout(round(data.draw(st.floats(0, 1)), 3), [None] * len(values), values=values))
    start = statistics.mean(rollout.reward or 0.0 for rollout in rollouts)
    found = estimate(rollouts, **VINE).calls.sort("rollout", "position")
    for number, rollout in enumerate(rollouts):
        own = found.filter(pl.col("rollout") == number)["advantage"].to_list()
        opens = [place == 0 or value is not None for place, value in enumerate(rollout.values)]
        total = sum(advantage for advantage, is_open in zip(own, opens, strict=True) if is_open)
        first = start if rollout.values[0] is None else rollout.values[0]
        assert total == pytest.approx((rollout.reward or 0.0) - first, abs=1e-9)


P = (0.5, 0.8, 0.3)
"""Probability that each call of an agent succeeds; its reward is 1 if the first and the last one do."""


def exact_value(outcomes: tuple[bool, ...]) -> float:
    """V of the state after these calls."""
    value = 1.0
    for place in (0, 2):
        value *= float(outcomes[place]) if place < len(outcomes) else P[place]
    return value


def sampled_value(outcomes: tuple[bool, ...], m: int, chance: random.Random) -> float:
    """The mean reward of `m` branches."""

    def reward() -> float:
        done = [*outcomes, *(chance.random() < p for p in P[len(outcomes) :])]
        return float(done[0] and done[2])

    return sum(reward() for _ in range(m)) / m


def errors(m: int, seed: int, rollouts: int = 400) -> list[float]:
    """Estimated less exact advantage of every second call of an agent with known values."""
    chance = random.Random(seed)
    outcomes = [tuple(chance.random() < p for p in P) for _ in range(rollouts)]
    made = [
        Rollout(
            float(one[0] and one[2]),
            [None] * 3,
            values=[None, sampled_value(one[:1], m, chance), sampled_value(one[:2], m, chance)],
        )
        for one in outcomes
    ]
    found = estimate(made, **VINE).calls.filter(pl.col("position") == 1).sort("rollout")["advantage"].to_list()
    exact = [exact_value(one[:2]) - exact_value(one[:1]) for one in outcomes]
    return [a - b for a, b in zip(found, exact, strict=True)]


def test_measured_advantages_are_unbiased_and_their_variance_falls_with_the_number_of_branches() -> None:
    # After a first success V = .3 before and after call 1, so the error has variance 2 · .3 · .7 / m for half of the rollouts.
    spread = {m: errors(m, seed=m) for m in (1, 4, 16)}
    for m, found in spread.items():
        assert statistics.mean(found) == pytest.approx(0.0, abs=4 * (0.21 / m / len(found)) ** 0.5)
        assert statistics.pvariance(found) == pytest.approx(0.21 / m, rel=0.3)


def test_with_many_branches_the_exact_advantages_come_out() -> None:
    assert max(map(abs, errors(40_000, seed=0, rollouts=6))) < 0.02

"""The test that may be read after any task: worked cases, its level, and that it stops early."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from trainspan_loop.trials.comparison import Comparison
from trainspan_loop.trials.evidence import Evidence
from trainspan_loop.trials.sequential import (
    Martingale,
    SequentialTest,
    could_be_worse,
    evidence_against,
    look,
    reachable,
)


def evidence(rewards: Mapping[str, Sequence[float]], failed: Mapping[str, int] | None = None) -> Evidence:
    """Outcomes of tasks: their rewards, and how many further rollouts failed."""
    lost = failed or {}
    finished = {task: [*[1.0] * len(rewards.get(task, ())), *[0.0] * lost.get(task, 0)] for task in {**rewards, **lost}}
    return Evidence({task: list(values) for task, values in rewards.items()}, finished, {})


def test_a_fall_and_a_rise_multiply_the_evidence_by_factors_that_average_one() -> None:
    # With one outcome each d / s is 1 or −1: f(λ) = 2 e^λ / (e^λ + e^−λ), and 2 − f for a rise, for λ = .4 and .8.
    falls = [2 * math.exp(rate) / (math.exp(rate) + math.exp(-rate)) for rate in (0.4, 0.8)]
    fell, rose, same = Martingale(), Martingale(), Martingale()
    fell.add([1.0], [0.0])
    rose.add([0.0], [1.0])
    same.add([0.7, 0.7], [0.7])
    assert fell.value == pytest.approx(sum(falls) / 2)
    assert rose.value == pytest.approx(2 - sum(falls) / 2)
    assert same.value == 1.0
    fell.add([0.0], [1.0])
    assert fell.value == pytest.approx(sum(f * (2 - f) for f in falls) / 2)


def test_several_outcomes_are_weighed_against_all_ways_to_share_them_out() -> None:
    # Two before (1, 1) and one after (0): the three ways to choose the one after give d = 1, −1/2 and −1/2, whose standard
    # deviation is √(1/2). So the factor is e^x / ((e^x + 2 e^(−x/2)) / 3) with x = λ √2.
    martingale = Martingale()
    martingale.add([1.0, 1.0], [0.0])
    xs = [rate * math.sqrt(2) for rate in (0.4, 0.8)]
    assert martingale.value == pytest.approx(
        sum(3 * math.exp(x) / (math.exp(x) + 2 * math.exp(-x / 2)) for x in xs) / 2
    )


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_evidence_does_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    before, after = [[3.0, 1.0], [2.0, 2.0], [0.0, 9.0]], [[1.0, 0.0], [2.0, 1.0], [5.0]]
    plain, scaled = Martingale(), Martingale()
    for old, new in zip(before, after, strict=True):
        plain.add(old, new)
        scaled.add([scale * value for value in old], [scale * value for value in new])
    assert scaled.value == pytest.approx(plain.value)


def test_eight_falls_of_one_are_enough_and_the_peak_counts_whatever_comes_after() -> None:
    # .9 (f(.4)^8 + f(.8)^8) / 2 + .1 ≥ 1 / (.7 · .05) = 28.6 for 8 falls, not for 7; with f(.4) = 1.380 and f(.8) = 1.664.
    def after_falls(falls: int, rises: int = 0) -> float:
        order = [str(number) for number in range(falls + rises)]
        fell = set(order[:falls])
        before = evidence({task: [float(task in fell)] for task in order})
        after = evidence({task: [float(task not in fell)] for task in order})
        return evidence_against(order, before, after)

    decisive = 1 / (0.7 * 0.05)
    assert after_falls(7) < decisive < after_falls(8)
    assert after_falls(8, rises=8) == after_falls(8)


def test_rollouts_that_fail_count_without_rewards() -> None:
    order = [str(number) for number in range(14)]
    before = evidence({task: [1.0] for task in order})
    after = evidence({}, dict.fromkeys(order, 1))
    found = look(order, before, after, 0.05, seed=0, is_complete=False)
    # .9 + .1 (f(.4)^14 + f(.8)^14) / 2 = .9 + .05 (90.9 + 1249) = 67.9
    assert found.evidence == pytest.approx(67.9, rel=0.02)
    assert found.is_worse
    assert found.reward is None


def test_a_decline_that_only_all_tasks_show_is_found_at_the_end() -> None:
    # 7 falls: p = 1/128 = .0078, of the .3 · .05 = .015 that are left.
    order = [str(number) for number in range(7)]
    before, after = evidence({task: [1.0] for task in order}), evidence({task: [0.0] for task in order})
    assert not look(order, before, after, 0.05, seed=0, is_complete=False).is_worse
    assert look(order, before, after, 0.05, seed=0, is_complete=True).is_worse
    assert reachable(7, 1, 0.05)
    assert not reachable(6, 1, 0.05)


@pytest.mark.parametrize(
    ("reward", "finished", "evidence", "worse"),
    [
        # .7 of the level of .05 is for the evidence: 1 / .035 = 28.571.
        (1.0, None, 28.58, True),
        (1.0, None, 28.56, False),
        # The other .3, .015, is for the rewards alone if every rollout ended with one.
        (0.0149, None, 1.0, True),
        (0.0151, None, 1.0, False),
        # Else nine tenths of it are for the rewards, and one tenth for finished rollouts.
        (0.0134, 1.0, 1.0, True),
        (0.0136, 1.0, 1.0, False),
        (1.0, 0.00149, 1.0, True),
        (1.0, 0.00151, 1.0, False),
    ],
)
def test_each_comparison_has_its_own_share_of_the_level(
    reward: float, finished: float | None, evidence: float, worse: bool
) -> None:
    by_reward = Comparison(9, 1.0, 0.5, reward)
    by_finished = None if finished is None else Comparison(9, 1.0, 0.5, finished)
    assert SequentialTest(0.05, evidence, by_reward, by_finished).is_worse is worse


def _fallen(rates: np.ndarray, shift: float) -> np.ndarray:
    logits = np.log(rates) - np.log1p(-rates)
    return np.asarray(1 / (1 + np.exp(shift - logits)))


def _releases(count: int, tasks: int, shift: float, failing: float) -> list[tuple[bool, int]]:
    """Of simulated releases: whether the candidate is called worse, and after how many tasks."""
    rng = np.random.default_rng(11)
    order = [str(number) for number in range(tasks)]
    found = []
    for _ in range(count):
        rates = np.clip(rng.beta(0.7, 0.7, tasks), 1e-6, 1 - 1e-6)
        sides = []
        for chances in (rates, _fallen(rates, shift)):
            lost = rng.random(tasks) < failing
            rewards = (rng.random(tasks) < chances).astype(float)
            kept = {task: [float(rewards[at])] for at, task in enumerate(order) if not lost[at]}
            sides.append(evidence(kept, {task: 1 for at, task in enumerate(order) if lost[at]}))
        used = 0
        for used in (*range(8, tasks, 8), tasks):
            test = look(order[:used], *sides, 0.05, seed=0, is_complete=used == tasks, shuffles=500)
            if test.is_worse:
                break
        found.append((test.is_worse, used))
    return found


def test_of_a_thousand_equal_releases_at_most_one_in_twenty_is_called_worse() -> None:
    found = _releases(1_000, 24, shift=0.0, failing=0.1)
    assert sum(worse for worse, _ in found) <= 50


def test_most_great_declines_are_found_before_all_tasks_are_used() -> None:
    found = _releases(60, 80, shift=3.0, failing=0.0)
    assert sum(worse for worse, _ in found) >= 55
    assert sum(used < 80 for worse, used in found if worse) >= 45


def test_a_baseline_that_earns_too_little_could_not_show_a_decline() -> None:
    def evidence(earned: int, tasks: int) -> Evidence:
        rewards = {str(task): [float(task < earned)] for task in range(tasks)}
        return Evidence(rewards, {task: [1.0] for task in rewards}, {})

    nothing = evidence(0, 50)
    # Without failures the permutation test has .3 · .05 = .015 of the level: 2^-6 is above that, 2^-7 is not.
    assert not could_be_worse(evidence(6, 50), nothing, 0.05)
    assert could_be_worse(evidence(7, 50), nothing, 0.05)
    assert not could_be_worse(nothing, nothing, 0.05)

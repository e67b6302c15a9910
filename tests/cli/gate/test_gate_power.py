"""The fall that a gate says it would have found, against simulated gates."""

import random
from itertools import combinations, product
from statistics import fmean, pvariance

import pytest

from trainspan_cli.gate.power import _moments, detectable_fall
from trainspan_loop.trials.evidence import Evidence
from trainspan_loop.trials.sequential import look


def test_the_moments_are_those_of_all_outcomes_that_may_fall() -> None:
    """Five outcomes, two of them the candidate's, of which each falls with probability .3."""
    outcomes, k, share = [1.0, 0.3, 0.2, 0.9, 0.5], 2, 0.3

    def difference(values: list[float], chosen: tuple[int, ...]) -> float:
        rest = [value for at, value in enumerate(values) if at not in chosen]
        return fmean(rest) - fmean(values[at] for at in chosen)

    ways = list(combinations(range(5), k))
    mean = square = variance = 0.0
    for chosen, falls in product(ways, product((False, True), repeat=k)):
        weight = share ** sum(falls) * (1 - share) ** (k - sum(falls)) / len(ways)
        fallen = {at for at, falls_here in zip(chosen, falls, strict=True) if falls_here}
        left = [0.0 if at in fallen else value for at, value in enumerate(outcomes)]
        mean += weight * difference(left, chosen)
        square += weight * difference(left, chosen) ** 2
        variance += weight * pvariance([difference(left, other) for other in ways])
    assert _moments(outcomes, k, share) == pytest.approx((mean, square - mean**2, variance))


def _gate(seed: int, tasks: int, n: int, before: float, after: float) -> tuple[Evidence, Evidence]:
    """Outcomes of 0 or 1 with these success rates."""
    rng = random.Random(seed)
    sides = [
        {str(task): [float(rng.random() < rate) for _ in range(n)] for task in range(tasks)} for rate in (before, after)
    ]
    one, other = (Evidence(side, {task: [1.0] * n for task in side}, {}) for side in sides)
    return one, other


@pytest.mark.ci
def test_about_four_of_five_gates_find_the_fall_that_those_without_a_decline_state() -> None:
    shares = []
    for tasks, n, rate in ((50, 1, 0.8), (50, 1, 0.5), (20, 4, 0.8)):
        falls = [detectable_fall(*_gate(seed, tasks, n, rate, rate), 0.015) for seed in range(20)]
        fall = fmean(fall for fall in falls if fall is not None)
        order = [str(task) for task in range(tasks)]
        sides = [_gate(seed, tasks, n, rate, rate - fall) for seed in range(1_000, 1_150)]
        tests = [look(order, *both, 0.05, seed=0, is_complete=True, shuffles=2_000) for both in sides]
        shares.append(fmean(test.is_worse for test in tests))
    # Of 300 gates each: .82, .80 and .78. The standard error of 150 is .03, and of all 450 .02.
    assert all(0.7 <= share <= 0.9 for share in shares), shares
    assert 0.75 <= fmean(shares) <= 0.85


def test_a_fall_that_even_the_loss_of_every_reward_would_not_show_is_not_stated() -> None:
    # Where all fail nothing can fall; three falls give p = 1/8.
    assert detectable_fall(*_gate(0, 50, 1, 0.0, 0.0), 0.015) is None
    assert detectable_fall(*_gate(0, 3, 1, 1.0, 1.0), 0.015) is None
    assert detectable_fall(Evidence({}, {}, {}), Evidence({}, {}, {}), 0.015) is None


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_fall_is_in_the_unit_of_the_rewards(scale: float) -> None:
    sides = _gate(0, 50, 2, 0.6, 0.6)
    scaled = [
        Evidence({task: [scale * reward for reward in rewards] for task, rewards in side.rewards.items()}, {}, {})
        for side in sides
    ]
    plain = detectable_fall(*sides, 0.015)
    assert plain is not None
    assert detectable_fall(*scaled, 0.015) == pytest.approx(scale * plain)

"""The fall in reward that a gate finds in four of five cases, from the outcomes of both sides.

The outcomes of a task are taken as equally good under both servers, and each of the candidate's then falls to the least reward with the
same probability. That is how a success rate falls. Both sums over tasks, that of the differences and that of their variance over all
ways to share out the outcomes, which the permutation test compares it with, are taken as normal.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Final

from trainspan_loop.trials.evidence import Evidence

__all__ = ["detectable_fall"]

_POWER: Final = 0.8
_HALVINGS: Final = 30


def detectable_fall(baseline: Evidence, candidate: Evidence, level: float) -> float | None:
    """The mean fall found in four of five gates with as many tasks, whose final test of rewards has this level; None if no fall is."""
    sides = baseline.rewards, candidate.rewards
    least = min((min(rewards) for one in sides for rewards in one.values()), default=0.0)
    least = min(least, 0.0)
    tasks = [
        ([reward - least for reward in (*rewards, *sides[1][task])], len(sides[1][task]))
        for task, rewards in sides[0].items()
        if task in sides[1]
    ]
    if not tasks or _power(tasks, 1.0, level) < _POWER:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        low, high = (share, high) if _power(tasks, share, level) < _POWER else (low, share)
    return high * fmean(fmean(outcomes) for outcomes, _ in tasks)


def _power(tasks: Sequence[tuple[Sequence[float], int]], share: float, level: float) -> float:
    """The probability that the test finds the fall if each of the candidate's outcomes falls to 0 with the probability `share`."""
    moments = [_moments(outcomes, k, share) for outcomes, k in tasks]
    falls, own, shuffled = zip(*moments, strict=True)
    fall = math.fsum(falls)
    variance = math.fsum(own) + math.fsum((one - fall / len(tasks)) ** 2 for one in falls)
    normal = NormalDist()
    beyond = fall - normal.inv_cdf(1 - level) * math.sqrt(max(math.fsum(shuffled), 0.0))
    return normal.cdf(beyond / math.sqrt(variance)) if variance > 0 else float(beyond > 0)


def _moments(outcomes: Sequence[float], k: int, share: float) -> tuple[float, float, float]:
    """Of one task's difference of means, if any `k` of its outcomes are the candidate's: its mean and variance, and the mean of its
    variance over all ways to share out what is left of the outcomes."""
    n, mean, square = len(outcomes), fmean(outcomes), fmean(outcome * outcome for outcome in outcomes)
    chosen = (square - mean * mean) * (n - k) / (k * (n - 1))  # variance of the mean of k of them
    lost = share * (1 - share) * square / k
    variance = lost + (k / (n - k) + 1 - share) ** 2 * chosen
    left_square = square * (n - share * k) / n
    left_mean_square = (mean * (1 - share * k / n)) ** 2 + (lost + share * share * chosen) * (k / n) ** 2
    return share * mean, variance, (left_square - left_mean_square) * n * n / (k * (n - k) * (n - 1))

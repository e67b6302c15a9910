"""Whether a version is worse, read after any task: the error is bounded whenever the comparison stops.

If both versions are equally good at a task, each of its outcomes could as well have come from the other one. For d, the mean
outcome before minus the mean after, exp(λ d / s) divided by its mean over all ways to share out the outcomes then has expectation 1,
given the outcomes themselves and all earlier tasks; with one outcome each this is 2 e^x / (e^x + e^−x) with x = λ d / s. The product over
tasks is a test martingale for each λ, and so is a weighted mean of several. By Ville's inequality (1939) the probability that it ever
reaches 1/a is at most a (Ramdas, Grünwald, Vovk and Shafer 2023, "Game-theoretic statistics and safe anytime-valid inference"; for
symmetric differences Vovk and Wang 2024, "Efficiency of nonparametric e-tests").

Seven tenths of the level go to that, three tenths to the permutation test of `comparison` once all tasks are used. Of each, rewards get
nine tenths and finished rollouts one tenth. So the probability of calling an equal version worse is at most the level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_loop.trials.comparison import SHUFFLES, Comparison, compare, smallest_p
from trainspan_loop.trials.evidence import Evidence

__all__ = ["Martingale", "SequentialTest", "could_be_worse", "evidence_against", "look", "reachable"]

_RATES: Final = (0.4, 0.8)
"""The λ, for moderate and large falls."""
_ANYTIME_SHARE: Final = 0.7
"""Of the level, for the martingale."""
_REWARD_SHARE: Final = 0.9
"""Of either part, for the rewards; the rest is for finished rollouts, of which few fail."""
_MOST_LOG: Final = 600.0


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """What the outcomes so far say about a new version."""

    level: float
    """Greatest probability of calling a version worse that is as good as the one before."""
    evidence: float
    """Greatest value of the martingale so far."""
    reward: Comparison | None = None
    """None before all tasks are used."""
    finished: Comparison | None = None
    """None as well if every rollout ended with a reward."""

    @property
    def decisive(self) -> float:
        """The evidence at which the version is worse, at any time."""
        return 1 / (_ANYTIME_SHARE * self.level)

    @property
    def reward_level(self) -> float:
        """The level of the permutation test of rewards, once all tasks are used."""
        return (_REWARD_SHARE if self.finished else 1.0) * (1 - _ANYTIME_SHARE) * self.level

    @property
    def is_worse(self) -> bool:
        if self.evidence >= self.decisive:
            return True
        by_reward = self.reward is not None and self.reward.p <= self.reward_level
        finished_level = (1 - _REWARD_SHARE) * (1 - _ANYTIME_SHARE) * self.level
        return by_reward or (self.finished is not None and self.finished.p <= finished_level)


class Martingale:
    """Evidence that outcomes after are worse than before, in units of their spread, from 1."""

    def __init__(self) -> None:
        self._logs = [0.0] * len(_RATES)
        self._spread, self._tasks = 0.0, 0

    def add(self, before: Sequence[float], after: Sequence[float]) -> None:
        """Takes the outcomes of the next task; one whose outcomes are all equal says nothing."""
        pooled = [*after, *before]
        if not before or not after or min(pooled) == max(pooled):
            return
        n, k = len(pooled), len(after)
        center = math.fsum(pooled) / n
        variance = math.fsum((outcome - center) ** 2 for outcome in pooled) / n
        if variance == 0:  # the squares are too small for a float
            return
        # Of d over the ways to share out the outcomes: it is known before it is seen who has which.
        self._spread += math.sqrt(variance / (n - 1) / k / (n - k)) * n
        self._tasks += 1
        unit = (1 / k + 1 / (n - k)) * self._tasks / self._spread
        for number, rate in enumerate(_RATES):
            weights = [-rate * unit * (outcome - center) for outcome in pooled]
            self._logs[number] += math.fsum(weights[:k]) - _log_mean_over_choices(weights, k)

    @property
    def value(self) -> float:
        return math.fsum(math.exp(min(log, _MOST_LOG)) for log in self._logs) / len(_RATES)


def look(
    order: Sequence[str],
    before: Evidence,
    after: Evidence,
    level: float,
    *,
    seed: int,
    is_complete: bool,
    shuffles: int = SHUFFLES,
) -> SequentialTest:
    """Reads the outcomes of the tasks so far, in the order in which they were drawn, which must not depend on outcomes.

    `seed` is that of the permutation test's shuffles: another one for each comparison.
    """
    evidence = evidence_against(order, before, after)
    if not is_complete:
        return SequentialTest(level, evidence)
    failed = _has_failed(before, after)
    reward = compare(before.rewards, after.rewards, seed, shuffles=shuffles)
    finished = compare(before.finished, after.finished, seed, shuffles=shuffles) if failed else None
    return SequentialTest(level, evidence, reward, finished)


def evidence_against(order: Sequence[str], before: Evidence, after: Evidence) -> float:
    """The greatest evidence at any task that the outcomes after are worse."""
    rewards, finished, greatest = Martingale(), Martingale(), 1.0
    for task in order:
        rewards.add(before.rewards.get(task, ()), after.rewards.get(task, ()))
        finished.add(before.finished.get(task, ()), after.finished.get(task, ()))
        greatest = max(greatest, _REWARD_SHARE * rewards.value + (1 - _REWARD_SHARE) * finished.value)
    return greatest


def reachable(tasks: int, n: int, level: float) -> bool:
    """Whether a version could be called worse on so many tasks with `n` outcomes each, if all of its outcomes are worse."""
    return smallest_p(tasks, n) <= _REWARD_SHARE * (1 - _ANYTIME_SHARE) * level


def could_be_worse(before: Evidence, after: Evidence, level: float) -> bool:
    """Whether these tasks could show a decline in reward at all: if every outcome after were the least one seen, or 0, on the tasks where
    one before is better than that."""
    least = min((min(rewards) for one in (before, after) for rewards in one.rewards.values()), default=0.0)
    least = min(least, 0.0)
    choices = [
        math.comb(len(rewards) + len(after.rewards[task]), len(rewards))
        for task, rewards in before.rewards.items()
        if task in after.rewards and max(rewards) > least
    ]
    share = _REWARD_SHARE if _has_failed(before, after) else 1.0
    smallest = max(1 / math.prod(choices), 1 / (SHUFFLES + 1))
    return bool(choices) and smallest <= share * (1 - _ANYTIME_SHARE) * level


def _has_failed(before: Evidence, after: Evidence) -> bool:
    return any(0.0 in outcomes for one in (before, after) for outcomes in one.finished.values())


def _log_mean_over_choices(weights: Sequence[float], k: int) -> float:
    """The logarithm of the mean of exp(sum of weights) over all choices of `k` weights."""
    sums = [0.0, *[-math.inf] * k]
    for weight in weights:
        for chosen in range(k, 0, -1):
            sums[chosen] = _log_add(sums[chosen], sums[chosen - 1] + weight)
    return sums[k] - math.log(math.comb(len(weights), k))


def _log_add(one: float, other: float) -> float:
    greater, smaller = (one, other) if one >= other else (other, one)
    return greater if smaller == -math.inf else greater + math.log1p(math.exp(smaller - greater))

"""Whether outcomes under a new version are worse than under the one before: a permutation test within tasks.

If both versions are equally good at a task, each of its outcomes could as well have come from the other version. So the
outcomes of each task are shuffled between the versions, many times, and p is the share of shuffles (the observed one
included) in which the new version is at least as far behind. The test is one-sided and exact: P(p ≤ level) ≤ level for
rewards of any kind and any number of tasks (Fisher 1935; with a sample of the shuffles, Phipson and Smyth 2010, eq. 2). With one
outcome of 0 or 1 per task and version it is McNemar's exact test.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SHUFFLES", "Comparison", "compare", "smallest_p"]

SHUFFLES: Final = 20_000
_AT_A_TIME: Final = 500
_ROUNDING: Final = 1e-9
"""Relative difference of sums that are equal except for the order of their terms."""

Outcomes = Mapping[str, Sequence[float]]
"""Task id → its outcomes under one version."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two versions on the tasks that have outcomes under both; each task counts once, with its mean."""

    tasks: int
    before: float | None
    """Mean over tasks; None without tasks."""
    after: float | None
    p: float
    """Probability of a difference at least as bad if the versions are equal; 1 without tasks."""


def compare(before: Outcomes, after: Outcomes, seed: int, *, shuffles: int = SHUFFLES) -> Comparison:
    """Compares the mean outcome over tasks. The numbers of outcomes may differ between tasks and versions.

    `shuffles` is a multiple of 500: the test is exact for any number, and p less random with more.
    """
    import numpy as np

    tasks = sorted(task for task in before.keys() & after.keys() if before[task] and after[task])
    if not tasks:
        return Comparison(0, None, None, 1.0)
    old, new = ([float(np.mean(outcomes[task])) for task in tasks] for outcomes in (before, after))
    observed = sum(new) - sum(old)
    groups: defaultdict[tuple[int, int], list[list[float]]] = defaultdict(list)
    for task in tasks:
        groups[len(after[task]), len(before[task])].append([*after[task], *before[task]])
    rng = np.random.default_rng(seed)
    slack = _ROUNDING * max(1.0, sum(map(abs, new)) + sum(map(abs, old)))
    extreme = 0
    for _ in range(shuffles // _AT_A_TIME):
        statistic = np.sum([_shuffled(values, n_new, rng) for (n_new, _), values in groups.items()], axis=0)
        extreme += int((statistic <= observed + slack).sum())
    return Comparison(len(tasks), float(np.mean(old)), float(np.mean(new)), (extreme + 1) / (shuffles + 1))


def _shuffled(tasks: Sequence[Sequence[float]], n_new: int, rng: "np.random.Generator") -> "NDArray[np.float64]":
    """Σ over tasks of (mean of the first `n_new` outcomes − mean of the others), for `_AT_A_TIME` shuffles within tasks."""
    import numpy as np

    values = np.broadcast_to(np.asarray(tasks, dtype=np.float64), (_AT_A_TIME, len(tasks), len(tasks[0])))
    mixed = rng.permuted(values, axis=2)
    differences = mixed[..., :n_new].mean(axis=2) - mixed[..., n_new:].mean(axis=2)
    summed: NDArray[np.float64] = differences.sum(axis=1)
    return summed


def smallest_p(tasks: int, n: int) -> float:
    """The smallest p that so many tasks with `n` outcomes per version can give: all outcomes of the new version are worse."""
    return max(float(comb(2 * n, n)) ** -tasks, 1 / (SHUFFLES + 1))

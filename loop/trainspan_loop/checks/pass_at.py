"""pass@k: the probability that at least one of k rollouts of a task succeeds."""

from collections.abc import Sequence
from math import comb

from trainspan_schemas.intervals import MOST_LEFT_OUT

__all__ = ["pass_at", "pass_at_k"]


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Unbiased estimate from `successes` of `n` rollouts of one task, k ≤ n: 1 − C(n−c, k)/C(n, k) (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} rollouts of a task, not {n}")
    return 1.0 - comb(n - successes, k) / comb(n, k)


def pass_at(tasks: Sequence[Sequence[bool]]) -> dict[int, float]:
    """pass@1, 2, 4 …, each as the mean over the tasks with so many rollouts, as long as hardly a task has fewer (MOST_LEFT_OUT)."""
    estimates: dict[int, float] = {}
    k = 1
    while (whole := [rollouts for rollouts in tasks if len(rollouts) >= k]) and len(tasks) - len(whole) <= (
        MOST_LEFT_OUT * len(tasks)
    ):
        estimates[k] = sum(pass_at_k(len(rollouts), sum(rollouts), k) for rollouts in whole) / len(whole)
        k *= 2
    return estimates

"""pass@k: the probability that at least one of k rollouts of a task succeeds."""

from collections.abc import Sequence
from math import comb

__all__ = ["pass_at", "pass_at_k"]


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Unbiased estimate from `successes` of `n` rollouts of one task, k ≤ n: 1 − C(n−c, k)/C(n, k) (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} rollouts of a task, not {n}")
    return 1.0 - comb(n - successes, k) / comb(n, k)


def pass_at(tasks: Sequence[Sequence[bool]]) -> dict[int, float]:
    """pass@1, 2, 4 … up to the smallest number of rollouts of a task, as means over tasks."""
    least = min((len(rollouts) for rollouts in tasks), default=0)
    estimates: dict[int, float] = {}
    k = 1
    while k <= least:
        estimates[k] = sum(pass_at_k(len(rollouts), sum(rollouts), k) for rollouts in tasks) / len(tasks)
        k *= 2
    return estimates

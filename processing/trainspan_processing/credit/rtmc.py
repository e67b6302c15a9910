"""Credit from trees of rollouts: the mean return of a call's action in its state less the mean return of the state.

RTMC (rollout-tree Monte Carlo), arXiv 2604.11037. Q(s, a) is the mean discounted return of the first visit of each rollout of the
group to state s with action a; V(s) is the mean over all such visits of s. Where visits are few, V is drawn towards the group's
mean reward V_0: V'(s) = (n_s V(s) + n_0 V_0) / (n_s + n_0) with n_0 = 2 (eq. 11), and A(s, a) = Q(s, a) − V'(s).
Two actions are equal if their tokens are: the signatures with which the paper compares commands are those of its agent.
"""

from typing import Final

import polars as pl

from trainspan_schemas.errors import UsageError

__all__ = ["RTMC", "check_rtmc", "rtmc_terms"]

RTMC: Final = "rtmc"
_BASELINE: Final = "dr_grpo"
_PRIOR_VISITS: Final = 2.0
"""n_0."""


def rtmc_terms(calls: pl.DataFrame) -> pl.DataFrame:
    """The calls with `value` Q, `center` V', `scale` 1 and the baseline's `drop`.

    `calls` have rollout, position, group, state, action, `return` (from the call on), and the baseline's `center` (V_0) and
    `drop`.
    """
    first = calls.sort("rollout", "position").unique(["rollout", "state", "action"], keep="first", maintain_order=True)
    of_action = first.group_by("group", "state", "action", maintain_order=True).agg(
        pl.col("return").mean().alias("value")
    )
    of_state = first.group_by("group", "state", maintain_order=True).agg(
        pl.col("return").mean().alias("_mean"), pl.len().alias("_visits")
    )
    valued = calls.join(of_action, on=["group", "state", "action"], how="left", nulls_equal=True, maintain_order="left")
    valued = valued.join(of_state, on=["group", "state"], how="left", nulls_equal=True, maintain_order="left")
    visits = pl.col("_visits")
    smoothed = (visits * pl.col("_mean") + _PRIOR_VISITS * pl.col("center")) / (visits + _PRIOR_VISITS)
    says_nothing = pl.col("drop").is_not_null()
    return valued.with_columns(
        pl.when(says_nothing).then(0.0).otherwise(smoothed).alias("center"),
        pl.when(says_nothing).then(0.0).otherwise(1.0).alias("scale"),
    ).drop("_mean", "_visits")


def check_rtmc(baseline: str, *, combine: str, group_over: str, per_agent: bool) -> None:
    """Raises UsageError for a setting that does not go with it."""
    if baseline != _BASELINE:
        raise UsageError(
            f"credit {RTMC!r} compares with states of the group and its mean reward, which baseline {baseline!r} does not: use "
            f"baseline {_BASELINE}"
        )
    if per_agent or combine != "sum" or group_over != "rollouts":
        raise UsageError(
            f"credit {RTMC!r} compares states of whole rollouts: leave agent_credit, combine and group_over at their defaults"
        )

"""Combines several rewards of a call: summed before the comparison, or compared one by one, summed and whitened (GDPO)."""

import polars as pl

from trainspan_processing.credit.baselines import EPSILON, are_equal
from trainspan_processing.credit.comparison import CALL
from trainspan_processing.credit.plan import CreditPlan
from trainspan_processing.rewards.names import rollout_column, step_column

__all__ = ["summed", "whitened"]


def summed(calls: pl.DataFrame, plan: CreditPlan) -> pl.DataFrame:
    """Adds `step_reward` and `rollout_reward`, Σ_k w_k·r_k over the rewards present, NULL without any."""

    def total(columns: dict[str, float]) -> pl.Expr:
        present = pl.any_horizontal(pl.col(name).is_not_null() for name in columns)
        return pl.when(present).then(pl.sum_horizontal(pl.col(name) * weight for name, weight in columns.items()))

    return calls.with_columns(
        total({step_column(reward.name): reward.weight for reward in plan.rewards}).alias("step_reward"),
        total({rollout_column(reward.name): reward.weight for reward in plan.rewards}).alias("rollout_reward"),
    )


def whitened(calls: pl.DataFrame, terms: pl.DataFrame, rollouts: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(A − μ_batch) / (σ_batch + ε) over rollouts, for the sum A of the advantages of the single rewards.

    GDPO, arXiv 2601.05242, eqs. 4 to 6: each reward is normalized in its group, the weighted sum over the batch.
    `rollouts` have rollout and `is_branch`; mean and σ are over those that are no branches, or over all if these are equal.
    """
    means = calls.group_by("rollout", maintain_order=True).agg(pl.col("advantage").mean())
    each = means.join(rollouts.select("rollout", "is_branch"), on="rollout", maintain_order="left")
    ordinary = each.filter(~pl.col("is_branch"))["advantage"]
    per_rollout = ordinary if _differ(ordinary) else each["advantage"]
    if not _differ(per_rollout):
        return calls, terms
    mean, spread = per_rollout.mean(), per_rollout.std()
    if not isinstance(mean, float) or not isinstance(spread, float):
        return calls, terms
    scale = 1.0 / (spread + EPSILON)
    last_step = calls.select(
        *CALL,
        pl.lit("").alias("reward_name"),
        pl.lit("batch").alias("term"),
        pl.lit(0.0).alias("value"),
        pl.lit(mean).alias("center"),
        pl.lit(scale).alias("scale"),
        pl.lit(1.0).alias("weight"),
        pl.lit(None, dtype=pl.String).alias("drop"),
    )
    return (
        calls.with_columns((pl.col("advantage") - mean) * scale),
        pl.concat([terms.with_columns(pl.col("weight") * scale), last_step]),
    )


def _differ(values: pl.Series) -> bool:
    if len(values) < 2:
        return False
    return not pl.select(are_equal(pl.lit(values.min()), pl.lit(values.max()))).item()

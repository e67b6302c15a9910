"""Advantages of calls: credit × baseline, as a sum of terms that reports can show in numbers.

    advantage = Σ_terms weight · (value − center) · scale

Usually there is one term; `gigpo` has two, `gdpo` one per reward and one for the batch. Statistics are float64, taken over
items (a rollout's return, or calls' values), and over all complete rewarded rollouts before any row is dropped.
"""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.credit.combine import summed, whitened
from trainspan_processing.credit.comparison import CALL, Comparison
from trainspan_processing.credit.plan import CreditPlan
from trainspan_processing.rewards.names import rollout_column, step_column
from trainspan_processing.tables import ROLLOUT_KEY, Schema
from trainspan_schemas.artifacts.branches import BRANCH_TASK

__all__ = ["TERMS", "Credited", "assign_advantages", "credit", "with_credit"]

TERMS: Final[Schema] = {
    "rollout": pl.UInt32,
    "position": pl.UInt32,
    "reward_name": pl.String,
    "term": pl.String,
    "value": pl.Float64,
    "center": pl.Float64,
    "scale": pl.Float64,
    "weight": pl.Float64,
    "drop": pl.String,
}
"""One row per call and term. `term`: `rollout` or `call` (the items of the statistics), `step`, `episode` and `state`
(gigpo), `action` (rtmc), `batch` (gdpo's last step). `drop`: why this comparison is meaningless, else NULL."""


@dataclass(frozen=True, slots=True)
class Credited:
    """The result of a plan."""

    calls: pl.DataFrame
    """rollout, position, `return`, `advantage` (f64) and `drop` (why no comparison is meaningful, else NULL); only calls
    with a value."""
    terms: pl.DataFrame
    """TERMS."""
    parts: pl.DataFrame
    """rollout, `part`, `value`: the shares of agents and rewards, for comparison in later datasets."""


def assign_advantages(calls: pl.DataFrame, rollouts: pl.DataFrame, history: pl.DataFrame, plan: CreditPlan) -> Credited:
    """Advantages of `calls` by `plan`.

    `calls` have rollout, position, request, agent, turn, for `gigpo` and `rtmc` state, for `rtmc` action, and per reward its
    `step_column` and `rollout_column` (f64, NULL if missing). `rollouts` have rollout, `group` (u32), run_id, judge, end_ns, rollout_id,
    attempt and `is_branch`, and are sorted by their ids; `history` is HISTORY. Raises UsageError if a user's function returns something
    invalid.
    """
    calls = calls.join(rollouts.select("rollout", "group"), on="rollout", how="inner").sort(CALL)
    comparison = Comparison(rollouts, history, plan)
    if plan.combine == "sum":
        terms, parts = comparison.terms(summed(calls, plan), "")
        return Credited(_added_up(terms, several=plan.needs_states), terms.select(*TERMS), parts)
    results = []
    for reward in plan.rewards:
        whole = pl.col(rollout_column(reward.name))
        rewarded = calls.with_columns(
            pl.col(step_column(reward.name)).alias("step_reward"),
            (whole.fill_null(0.0) if reward.is_penalty else whole).alias("rollout_reward"),
        )
        terms, parts = comparison.terms(rewarded, f"reward:{reward.name}")
        weight = pl.lit(reward.weight)
        of_reward = terms.with_columns(
            pl.lit(reward.name).alias("reward_name"), pl.col("weight") * weight, pl.col("worth") * weight
        )
        results.append((of_reward, parts))
    terms = pl.concat([item for item, _ in results])
    credited, scaled = whitened(_added_up(terms, several=True), terms.select(*TERMS), rollouts)
    return Credited(credited, scaled, pl.concat([parts for _, parts in results]))


def credit(calls: pl.DataFrame, compared: pl.DataFrame, history: pl.DataFrame, plan: CreditPlan) -> Credited:
    """The advantages of `calls` of the `compared` rollouts (RewardedChunk), with HISTORY of all earlier rollouts."""
    facts = compared.select(
        "rollout",
        pl.col("group_id").rank("dense").cast(pl.UInt32).alias("group"),
        "run_id",
        "judge",
        "end_ns",
        *ROLLOUT_KEY,
        pl.col("task_id").str.contains(BRANCH_TASK).fill_null(value=False).alias("is_branch"),
    ).sort(ROLLOUT_KEY)
    return assign_advantages(calls, facts, history.join(facts, on=ROLLOUT_KEY, how="anti"), plan)


def with_credit(calls: pl.DataFrame, advantages: pl.DataFrame) -> pl.DataFrame:
    """Adds return, advantage and drop to RewardedChunk.calls. A compared call without a value lacks a reward."""
    without_value = pl.when(pl.col("rollout").is_not_null() & pl.col("return").is_null()).then(pl.lit("no_reward"))
    return calls.join(advantages, on=["rollout", "position"], how="left", maintain_order="left").with_columns(
        pl.coalesce("reason", without_value).alias("reason")
    )


def _added_up(terms: pl.DataFrame, *, several: bool) -> pl.DataFrame:
    """rollout, position, return, advantage and drop from TERMS with `worth`; `several`: a call may have more than one."""
    advantage = pl.col("weight") * (pl.col("value") - pl.col("center")) * pl.col("scale")
    if not several:
        return terms.select(*CALL, pl.col("worth").alias("return"), advantage.alias("advantage"), "drop")
    # Grouping by one sorted number yields slices; grouping by two columns yields lists, which take ten times the memory.
    call = pl.col("rollout").cast(pl.UInt64) * 2**32 + pl.col("position")
    says_nothing = pl.col("drop").is_not_null().all()
    return (
        terms.select(call.alias("call"), advantage.alias("advantage"), "worth", "drop")
        .sort("call", maintain_order=True)
        .group_by("call", maintain_order=True)
        .agg(
            pl.col("worth").sum().alias("return"),
            pl.col("advantage").sum(),
            pl.when(says_nothing).then(pl.col("drop").first()).alias("drop"),
        )
        .select(
            (pl.col("call") // 2**32).cast(pl.UInt32).alias("rollout"),
            (pl.col("call") % 2**32).cast(pl.UInt32).alias("position"),
            "return",
            "advantage",
            "drop",
        )
    )

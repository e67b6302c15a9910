"""Baselines: the reference that a value is compared with. Frame in, frame out; float64; statistics are taken over items.

An item is one of the compared values: a rollout's return, or a call's with `group_over = turns` or `calls`, `step` and `gigpo`.
Input: one row per item with `item` (u32), `rollout` (u32, the rollout of the value), `group` (u32, compared within a task),
`pool` (u32, compared across tasks: with `group_over = turns` and `step` the calls of the same turn or agent, else everything, of
one judge),
`value` v (f64, never NULL), `is_branch` (whether the rollout is a branch of another one), `run_id`, `end_ns`, `rollout_id`,
`attempt`, and `history` (True for a rollout's value from an earlier dataset, which only `running` and `rae` use; `item`,
`rollout` and `group` are NULL there).
Output: the input's rows that are not history, with `center` and `scale` (f64) such that a value v has
    advantage = (v − center) · scale,
and `drop`: the reason why the comparison is meaningless (then center and scale are 0), else NULL.
Branches begin in states of other rollouts, many of which are lost or won: they are compared with the branches from their own
state, and are no part of what other rollouts are compared with.
Values of a single rollout cannot be compared, and values that differ only by rounding are equal.
"""

from collections.abc import Callable
from typing import Final

import polars as pl

__all__ = [
    "ABSOLUTE",
    "BASELINES",
    "EPSILON",
    "RAE_DECAY",
    "RELATIVE",
    "RUNNING_WINDOW",
    "WITH_GROUPS",
    "WITH_HISTORY",
    "Baseline",
    "are_equal",
    "spread_reason",
]

Baseline = Callable[[pl.DataFrame], pl.DataFrame]

EPSILON: Final = 1e-4
RUNNING_WINDOW: Final = 256
RAE_DECAY: Final = 0.95

RELATIVE: Final = 1e-9
ABSOLUTE: Final = 1e-12
"""Values closer than this, relative to the greater one or absolutely, differ only by the rounding of sums."""

_V: Final = pl.col("value")
_MEAN_G: Final = _V.mean().over("group")
_STD_G: Final = _V.std(ddof=1).over("group")
_ONE: Final = pl.lit(1.0, dtype=pl.Float64)
_OWN: Final = ["rollout_id", "attempt"]


def grpo(items: pl.DataFrame) -> pl.DataFrame:
    """(v − μ_g) / (σ_g + ε), σ with ddof 1, ε = 1e-4. Group Relative Policy Optimization, arXiv 2402.03300, section 4.1."""
    return _by_group(items, _MEAN_G, 1.0 / (_STD_G + EPSILON))


def dr_grpo(items: pl.DataFrame) -> pl.DataFrame:
    """v − μ_g. Dr. GRPO, arXiv 2503.20783: no division by the spread, which favors easy and hard tasks."""
    return _by_group(items, _MEAN_G, _ONE)


def rloo(items: pl.DataFrame) -> pl.DataFrame:
    """v_i less the mean of the other rollouts of its group. REINFORCE leave-one-out, arXiv 2402.14740, section 2.

    For an item's own value this is n/(n−1) · (v_i − μ_g). If a rollout has several items in the group, all of them are
    left out: they come from the same sampled trajectory.
    """
    of_rollout = ["group", "rollout"]
    total, size = (_V.sum().over("group"), pl.len().over("group"))
    others = (total - _V.sum().over(of_rollout)) / (size - pl.len().over(of_rollout))
    return _by_group(items, others, _ONE)


def batch(items: pl.DataFrame) -> pl.DataFrame:
    """(v − μ_g) / σ_batch: centered by group, scaled by the spread of the pool (ddof 1), or of the group if the pool has none.

    arXiv 2508.08221 finds this normalization more robust if groups have little spread.
    """
    # A group whose rollouts have different judges may be alone in each of their pools.
    scale = pl.coalesce("_scale", 1.0 / _V.std(ddof=1).over("group"))
    return _by_group(_scaled(items), _MEAN_G, scale).drop("_scale")


def global_(items: pl.DataFrame) -> pl.DataFrame:
    """(v − μ_batch) / σ_batch over the pool (ddof 1). REINFORCE++, arXiv 2501.03262."""
    scale = pl.col("_scale")

    def compare(others: pl.DataFrame) -> pl.DataFrame:
        return _with_center_and_scale(_current(others), _V.mean().over("pool"), scale, _reason("pool"))

    return _apart(_scaled(items), compare, scale).drop("_scale")


def running(items: pl.DataFrame) -> pl.DataFrame:
    """v less the mean of the last 256 values of the same run and pool before its rollout, ordered by the end of rollouts.

    A moving-average baseline, Williams 1992, section 4. A rollout with several items in the pool counts once, with their mean.
    Values of earlier datasets are included. An item with no value before it is not compared.
    """
    before = pl.col("worth").rolling_mean(RUNNING_WINDOW, min_samples=1).shift(1)
    alone = pl.when(pl.col("center").is_null()).then(pl.lit("singleton_group"))
    return _apart(items, lambda others: _with_center_and_scale(_in_time(others, before), pl.col("center"), _ONE, alone))


def rae(items: pl.DataFrame) -> pl.DataFrame:
    """v − b, after updating b ← .95·b + .05·v, from b = 0, in the order in which the rollouts of the run ended.

    Role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119. Each pool, and with `per_agent` each agent, has its own
    b; a rollout with several items in the pool updates it once, with their mean. Values of earlier datasets are included.
    """
    # An exponential mean starts at its first value; weighting in a leading 0 makes it start at b = 0.
    weight = RAE_DECAY ** pl.int_range(1, pl.len() + 1)
    means = pl.col("worth").ewm_mean(alpha=1.0 - RAE_DECAY, adjust=True) * (1.0 - weight)
    never = pl.lit(None, dtype=pl.String)
    return _apart(items, lambda others: _with_center_and_scale(_in_time(others, means), pl.col("center"), _ONE, never))


def none(items: pl.DataFrame) -> pl.DataFrame:
    """v itself. REINFORCE without a baseline, Williams 1992."""
    return _with_center_and_scale(_current(items), pl.lit(0.0), _ONE, pl.lit(None, dtype=pl.String))


BASELINES: Final[dict[str, Baseline]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "batch": batch,
    "global": global_,
    "running": running,
    "rae": rae,
    "none": none,
}

WITH_HISTORY: Final = ("running", "rae")
"""Baselines that use earlier datasets; a user's own baseline may too."""

WITH_GROUPS: Final = ("grpo", "dr_grpo", "rloo", "batch")
"""Baselines that compare within groups."""


def spread_reason(rollouts: pl.Expr, least: pl.Expr, greatest: pl.Expr) -> pl.Expr:
    """Why items with this number of rollouts, least and greatest value cannot be compared, else NULL."""
    equal = are_equal(least, greatest)
    return pl.when(rollouts < 2).then(pl.lit("singleton_group")).when(equal).then(pl.lit("zero_spread_group"))


def are_equal(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    """Whether two values differ by no more than the rounding of sums."""
    return (left - right).abs() <= pl.max_horizontal(RELATIVE * pl.max_horizontal(left.abs(), right.abs()), ABSOLUTE)


def _current(items: pl.DataFrame) -> pl.DataFrame:
    return items.filter(~pl.col("history"))


def _in_time(items: pl.DataFrame, center: pl.Expr) -> pl.DataFrame:
    """The items without history, with `center`: an expression over `worth` of each run's and pool's rollouts by their end."""
    by = ["run_id", "pool", "end_ns", *_OWN]
    worth = items.group_by(by, maintain_order=True).agg(_V.mean().alias("worth")).sort(by[2:], nulls_last=False)
    worth = worth.with_columns(center.over("run_id", "pool").alias("center"))
    return _current(items).join(worth.select("pool", *_OWN, "center"), on=["pool", *_OWN], maintain_order="left")


def _apart(items: pl.DataFrame, compare: Baseline, scale: pl.Expr = _ONE) -> pl.DataFrame:
    """Applies `compare` to the items that are no branches; branches have the mean of their group as their center."""
    branches = items.filter("is_branch")
    others = compare(items.filter(~pl.col("is_branch")))
    return others if branches.is_empty() else pl.concat([others, _by_group(branches, _MEAN_G, scale)])


def _scaled(items: pl.DataFrame) -> pl.DataFrame:
    """The items without history, with `_scale`: 1/σ over those of the pool that are no branches, or over all if that is 0."""

    def spread(values: pl.Expr) -> pl.Expr:
        least, greatest = values.min().over("pool"), values.max().over("pool")
        return pl.when(~are_equal(least, greatest)).then(values.std(ddof=1).over("pool"))

    ordinary = pl.when(~pl.col("is_branch")).then(_V)
    return _current(items).with_columns((1.0 / pl.coalesce(spread(ordinary), spread(_V))).alias("_scale"))


def _by_group(items: pl.DataFrame, center: pl.Expr, scale: pl.Expr) -> pl.DataFrame:
    return _with_center_and_scale(_current(items), center, scale, _reason("group"))


def _reason(by: str) -> pl.Expr:
    rollout = pl.col("rollout")
    rollouts = pl.when(rollout.min().over(by) == rollout.max().over(by)).then(1).otherwise(2)
    return spread_reason(rollouts, _V.min().over(by), _V.max().over(by))


def _with_center_and_scale(items: pl.DataFrame, center: pl.Expr, scale: pl.Expr, reason: pl.Expr) -> pl.DataFrame:
    """Sets center and scale to 0 if there is a reason, so that the advantage is 0 and never NaN.

    A value that differs from its center only by rounding has advantage 0, whatever its scale.
    """
    settled = items.with_columns(
        center.cast(pl.Float64).alias("center"), scale.cast(pl.Float64).alias("scale"), reason.alias("drop")
    )
    compared = pl.col("drop").is_null()
    at_center = pl.when(are_equal(_V, pl.col("center"))).then(_V).otherwise("center")
    return settled.with_columns(
        pl.when(compared).then(at_center).otherwise(0.0).alias("center"),
        pl.when(compared).then(pl.col("scale")).otherwise(0.0).alias("scale"),
    )

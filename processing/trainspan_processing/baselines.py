"""Baselines: what a value is compared with. Frame in, frame out; float64; a statistic is taken over items.

An item is one value among those that are compared: a rollout's return, or with `group_over = calls`, `step` and `gigpo`
a call's. Input: one row per item with `item` (u32), `group` (u32), `value` v (f64, never NULL), `run_id`, `end_ns`,
`rollout_id`, `attempt`, and `history` (True for a rollout of an earlier dataset, which only `running` and `rae` look at;
`item` and `group` are NULL there).
Output: the input's rows that are not history, with `center` and `scale` (f64) such that a value v has
    advantage = (v − center) · scale,
and `drop`: the reason why the comparison says nothing (then center and scale are 0), else NULL.
"""

from collections.abc import Callable
from typing import Final

import polars as pl

__all__ = ["BASELINES", "EPSILON", "RAE_DECAY", "RUNNING_WINDOW", "WITH_HISTORY", "Baseline", "spread_reason"]

Baseline = Callable[[pl.DataFrame], pl.DataFrame]

EPSILON: Final = 1e-4
RUNNING_WINDOW: Final = 256
RAE_DECAY: Final = 0.95

_V: Final = pl.col("value")
_MEAN_G: Final = _V.mean().over("group")
_STD_G: Final = _V.std(ddof=1).over("group")
_SIZE_G: Final = pl.len().over("group")
_ONE: Final = pl.lit(1.0, dtype=pl.Float64)
_IN_TIME: Final = ["end_ns", "rollout_id", "attempt", "item"]


def grpo(items: pl.DataFrame) -> pl.DataFrame:
    """(v − μ_g) / (σ_g + ε), σ with ddof 1, ε = 1e-4. Group Relative Policy Optimization, arXiv 2402.03300, section 4.1."""
    return _by_group(items, _MEAN_G, 1.0 / (_STD_G + EPSILON))


def dr_grpo(items: pl.DataFrame) -> pl.DataFrame:
    """v − μ_g. Dr. GRPO, arXiv 2503.20783: no division by the spread, which favours easy and hard tasks."""
    return _by_group(items, _MEAN_G, _ONE)


def rloo(items: pl.DataFrame) -> pl.DataFrame:
    """v_i less the mean of the others of its group. REINFORCE leave-one-out, arXiv 2402.14740, section 2.

    For an item's own value this is n/(n−1) · (v_i − μ_g).
    """
    others = (_V.sum().over("group") - _V) / (_SIZE_G - 1)
    return _by_group(items, others, _ONE)


def batch(items: pl.DataFrame) -> pl.DataFrame:
    """(v − μ_g) / σ_batch: centred by group, scaled by the spread of all items (ddof 1).

    The normalisation that arXiv 2508.08221 finds more robust where groups have little spread.
    """
    return _by_group(items, _MEAN_G, 1.0 / _V.std(ddof=1))


def global_(items: pl.DataFrame) -> pl.DataFrame:
    """(v − μ_batch) / σ_batch over all items (ddof 1). REINFORCE++, arXiv 2501.03262."""
    return _settled(_current(items), _V.mean(), 1.0 / _V.std(ddof=1), spread_reason(pl.len(), _V.min(), _V.max()))


def running(items: pl.DataFrame) -> pl.DataFrame:
    """v less the mean of the last 256 values of the same run before it, in the order in which rollouts ended.

    A moving-average baseline, Williams 1992, section 4. Earlier datasets' values count among them. An item before which
    there is none is compared with nothing.
    """
    before = _V.rolling_mean(RUNNING_WINDOW, min_samples=1).shift(1).over("run_id")
    ordered = items.sort(*_IN_TIME, nulls_last=False).with_columns(before.alias("center"))
    alone = pl.when(pl.col("center").is_null()).then(pl.lit("singleton_group"))
    return _settled(_current(ordered), pl.col("center"), _ONE, alone)


def rae(items: pl.DataFrame) -> pl.DataFrame:
    """v − b with b ← .95·b + .05·v first, from b = 0, in the order in which the rollouts of the run ended.

    Role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119; with `per_agent` each agent has a b of its
    own. Earlier datasets' values count among them.
    """
    # An exponential mean starts at its first value: b = 0 is what remains when a leading 0 is weighted in.
    weight = RAE_DECAY ** pl.int_range(1, pl.len() + 1)
    means = _V.ewm_mean(alpha=1.0 - RAE_DECAY, adjust=True) * (1.0 - weight)
    ordered = items.sort(*_IN_TIME, nulls_last=False).with_columns(means.over("run_id").alias("center"))
    return _settled(_current(ordered), pl.col("center"), _ONE, pl.lit(None, dtype=pl.String))


def none(items: pl.DataFrame) -> pl.DataFrame:
    """v itself. REINFORCE without a baseline, Williams 1992."""
    return _settled(_current(items), pl.lit(0.0), _ONE, pl.lit(None, dtype=pl.String))


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
"""What looks at earlier datasets; a user's own baseline may too."""


def spread_reason(size: pl.Expr, least: pl.Expr, greatest: pl.Expr) -> pl.Expr:
    """Why items of this number, least and greatest value are no comparison, else NULL."""
    return pl.when(size < 2).then(pl.lit("singleton_group")).when(least == greatest).then(pl.lit("zero_spread_group"))


def _current(items: pl.DataFrame) -> pl.DataFrame:
    return items.filter(~pl.col("history"))


def _by_group(items: pl.DataFrame, center: pl.Expr, scale: pl.Expr) -> pl.DataFrame:
    reason = spread_reason(_SIZE_G, _V.min().over("group"), _V.max().over("group"))
    return _settled(_current(items), center, scale, reason)


def _settled(items: pl.DataFrame, center: pl.Expr, scale: pl.Expr, reason: pl.Expr) -> pl.DataFrame:
    """Where there is a reason, center and scale are 0: the advantage is 0, and never NaN."""
    return items.with_columns(
        center.cast(pl.Float64).alias("center"), scale.cast(pl.Float64).alias("scale"), reason.alias("drop")
    ).with_columns(
        pl.when(pl.col("drop").is_null()).then(pl.col("center")).otherwise(0.0).alias("center"),
        pl.when(pl.col("drop").is_null()).then(pl.col("scale")).otherwise(0.0).alias("scale"),
    )

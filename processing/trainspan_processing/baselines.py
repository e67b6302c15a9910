"""Baselines: what a value is compared with. Frame in, frame out; float64; statistics over rollouts, not over rows.

Input: one row per complete, rewarded rollout with `group` (u32), `reward` R (f64), `run_id`, `end_ns`, `rollout_id`,
`attempt`, and `history` (True for a rollout of an earlier dataset, which only `running` looks at).
Output: the input's rows that are not history, with `center` and `scale` (f64) such that a call with value v has
    advantage = (v − center) · scale,
and `drop`: the reason why the comparison says nothing (then scale is 0), else NULL.
"""

from collections.abc import Callable
from typing import Final

import polars as pl

__all__ = ["BASELINES", "EPSILON", "RUNNING_WINDOW", "Baseline"]

Baseline = Callable[[pl.DataFrame], pl.DataFrame]

EPSILON: Final = 1e-4
RUNNING_WINDOW: Final = 256

_R: Final = pl.col("reward")
_MEAN_G: Final = _R.mean().over("group")
_STD_G: Final = _R.std(ddof=1).over("group")
_SIZE_G: Final = pl.len().over("group")
_ONE: Final = pl.lit(1.0, dtype=pl.Float64)


def grpo(rollouts: pl.DataFrame) -> pl.DataFrame:
    """(R − μ_g) / (σ_g + ε), σ with ddof 1, ε = 1e-4. Group Relative Policy Optimization, arXiv 2402.03300, eq. 3.1.2."""
    return _by_group(rollouts, _MEAN_G, 1.0 / (_STD_G + EPSILON))


def dr_grpo(rollouts: pl.DataFrame) -> pl.DataFrame:
    """R − μ_g. Dr. GRPO, arXiv 2503.20783: no division by the spread."""
    return _by_group(rollouts, _MEAN_G, _ONE)


def rloo(rollouts: pl.DataFrame) -> pl.DataFrame:
    """R_i − mean of the others of its group = n/(n−1)·(R_i − μ_g). REINFORCE leave-one-out, arXiv 2402.14740."""
    others = (_R.sum().over("group") - _R) / (_SIZE_G - 1)
    return _by_group(rollouts, others, _ONE)


def batch(rollouts: pl.DataFrame) -> pl.DataFrame:
    """(R − μ_g) / σ_batch: centred by group, scaled by the spread of all rollouts (ddof 1)."""
    return _by_group(rollouts, _MEAN_G, 1.0 / _R.std(ddof=1))


def global_(rollouts: pl.DataFrame) -> pl.DataFrame:
    """(R − μ_batch) / σ_batch over all rollouts (ddof 1). REINFORCE++, arXiv 2501.03262."""
    return _settled(_current(rollouts), _R.mean(), 1.0 / _R.std(ddof=1), _spread_reason(pl.len(), _R.min(), _R.max()))


def running(rollouts: pl.DataFrame) -> pl.DataFrame:
    """R minus the mean of the last 256 rewards of the same run before it, in the order in which rollouts ended.

    Earlier datasets' rewards count among them. A rollout before which there is none is compared with nothing.
    """
    before = _R.rolling_mean(RUNNING_WINDOW, min_samples=1).shift(1).over("run_id")
    ordered = rollouts.sort("end_ns", "rollout_id", "attempt").with_columns(before.alias("center"))
    alone = pl.when(pl.col("center").is_null()).then(pl.lit("singleton_group"))
    return _settled(_current(ordered), pl.col("center"), _ONE, alone)


def none(rollouts: pl.DataFrame) -> pl.DataFrame:
    """R itself. REINFORCE without a baseline."""
    return _settled(_current(rollouts), pl.lit(0.0), _ONE, pl.lit(None, dtype=pl.String))


BASELINES: Final[dict[str, Baseline]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "batch": batch,
    "global": global_,
    "running": running,
    "none": none,
}


def _current(rollouts: pl.DataFrame) -> pl.DataFrame:
    return rollouts.filter(~pl.col("history"))


def _by_group(rollouts: pl.DataFrame, center: pl.Expr, scale: pl.Expr) -> pl.DataFrame:
    reason = _spread_reason(_SIZE_G, _R.min().over("group"), _R.max().over("group"))
    return _settled(_current(rollouts), center, scale, reason)


def _spread_reason(size: pl.Expr, least: pl.Expr, greatest: pl.Expr) -> pl.Expr:
    return pl.when(size < 2).then(pl.lit("singleton_group")).when(least == greatest).then(pl.lit("zero_spread_group"))


def _settled(rollouts: pl.DataFrame, center: pl.Expr, scale: pl.Expr, reason: pl.Expr) -> pl.DataFrame:
    """Where there is a reason, center and scale are 0: the advantage is 0, and never NaN."""
    return rollouts.with_columns(
        center.cast(pl.Float64).alias("center"), scale.cast(pl.Float64).alias("scale"), reason.alias("drop")
    ).with_columns(
        pl.when(pl.col("drop").is_null()).then(pl.col("center")).otherwise(0.0).alias("center"),
        pl.when(pl.col("drop").is_null()).then(pl.col("scale")).otherwise(0.0).alias("scale"),
    )

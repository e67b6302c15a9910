"""Credit: the value of each call of a rollout. Frame in, frame out; float64.

Input: one row per call of a rewarded rollout with `rollout` (u32), `position` (from 0 in its rollout), `agent`, `turn`,
`step_reward` (the call's own, NULL if none) and `rollout_reward` (bound to the rollout itself, NULL if none).
Output: the same rows with `return` (f64), the call's value; NULL if it has none.
"""

from collections.abc import Callable
from typing import Final

import polars as pl

__all__ = ["CREDITS", "Credit"]

Credit = Callable[[pl.DataFrame, float], pl.DataFrame]
"""(calls, gamma) → calls with `return`."""


def identical(calls: pl.DataFrame, gamma: float) -> pl.DataFrame:
    """Every call gets R_i = rollout reward + Σ_t r_it. LightningRL, arXiv 2508.03680, section 3.2. `gamma` is not used."""
    total = pl.col("step_reward").sum().over("rollout") + pl.col("rollout_reward").fill_null(0.0)
    return calls.with_columns(total.alias("return"))


def return_to_go(calls: pl.DataFrame, gamma: float) -> pl.DataFrame:
    """G_it = Σ_{s≥t} γ^(s−t) r_is; the last call gets the rollout's own reward. Sutton & Barto 2018, eq. 3.8."""
    calls = calls.sort("rollout", "position").with_columns(_own_reward().fill_null(0.0).alias("_reward"))
    if gamma == 1.0:
        returns = pl.col("_reward").reverse().cum_sum().reverse().over("rollout")
        return calls.with_columns(returns.alias("return")).drop("_reward")
    return calls.with_columns(pl.Series("return", _discounted(calls, gamma), dtype=pl.Float64)).drop("_reward")


def step(calls: pl.DataFrame, gamma: float) -> pl.DataFrame:
    """r_it: only the call's own reward; the last call also gets the rollout's own reward. `gamma` is not used.

    A call without a reward has no value: it is not compared, and is dropped as `no_reward`.
    """
    return calls.with_columns(_own_reward().alias("return"))


CREDITS: Final[dict[str, Credit]] = {"identical": identical, "return_to_go": return_to_go, "step": step}


def _own_reward() -> pl.Expr:
    """r_it with the rollout's reward on its last call; NULL if there is neither."""
    is_last = pl.col("position") == pl.col("position").max().over("rollout")
    whole = pl.when(is_last).then("rollout_reward")
    return pl.when(pl.col("step_reward").is_null()).then(whole).otherwise(pl.col("step_reward") + whole.fill_null(0.0))


def _discounted(calls: pl.DataFrame, gamma: float) -> list[float]:
    """Returns of calls sorted by (rollout, position), from the last to the first."""
    returns: list[float] = []
    value, later = 0.0, None
    for rollout, reward in zip(reversed(calls["rollout"].to_list()), reversed(calls["_reward"].to_list()), strict=True):
        value = reward + (gamma * value if rollout == later else 0.0)
        later = rollout
        returns.append(value)
    return returns[::-1]

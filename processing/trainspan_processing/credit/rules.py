"""Credit: the value of each call of a rollout. Frame in, frame out; float64.

Input: one row per call of a rewarded rollout with `rollout` (u32), `position` (from 0 in its rollout), `request` (u32, the number
of its request in the rollout: choices of one request share it), `agent`, `turn`, `step_reward` (the call's own, NULL if none) and
`rollout_reward` (bound to the rollout itself, NULL if none).
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
    """G_it = Σ_{s≥t} γ^(s−t) r_is; the last call gets the rollout's own reward. Sutton & Barto 2018, eq. 3.8.

    The steps s are requests: a choice gets its own reward and those of later requests, of which each counts with the sum of its
    choices' rewards, but not the rewards of its siblings.
    """
    calls = calls.sort("rollout", "position")
    whole = pl.col("rollout_reward").first().fill_null(0.0)
    requests = calls.group_by("rollout", "request", maintain_order=True).agg(pl.col("step_reward").sum(), whole)
    requests = requests.sort("rollout", "request")
    later = pl.Series("_later", _values_after(requests, gamma), dtype=pl.Float64)
    calls = calls.join(
        requests.select("rollout", "request", later), on=["rollout", "request"], how="left", maintain_order="left"
    )
    return calls.with_columns((_own_reward().fill_null(0.0) + pl.col("_later")).alias("return")).drop("_later")


def step(calls: pl.DataFrame, gamma: float) -> pl.DataFrame:
    """r_it: only the call's own reward; the last call also gets the rollout's own reward. `gamma` is not used.

    If the last request has several choices, each gets it. A call without a reward has no value: it is not compared, and is
    dropped as `no_reward`.
    """
    return calls.with_columns(_own_reward().alias("return"))


CREDITS: Final[dict[str, Credit]] = {"identical": identical, "return_to_go": return_to_go, "step": step}


def _own_reward() -> pl.Expr:
    """r_it with the rollout's reward on the calls of its last request; NULL if there is neither."""
    is_last = pl.col("request") == pl.col("request").max().over("rollout")
    whole = pl.when(is_last).then("rollout_reward")
    return pl.when(pl.col("step_reward").is_null()).then(whole).otherwise(pl.col("step_reward") + whole.fill_null(0.0))


def _values_after(requests: pl.DataFrame, gamma: float) -> list[float]:
    """The discounted rewards after each request, of requests sorted by (rollout, request) with their `step_reward`s and the
    `rollout_reward` of their rollout."""
    after: list[float] = []
    value, current = 0.0, None
    for rollout, _, of_request, of_rollout in reversed(requests.rows()):
        is_last = rollout != current
        value, current = 0.0 if is_last else value, rollout
        after.append(gamma * value)
        value = of_request + (of_rollout if is_last else 0.0) + gamma * value
    return after[::-1]

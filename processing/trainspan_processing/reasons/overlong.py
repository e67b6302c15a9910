"""Calls that end by length: kept, masked, or punished. DAPO, arXiv 2503.14476, section 3.4."""

from typing import Final

import polars as pl

from trainspan_processing.tables import EDGES, ROLLOUT_KEY
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

__all__ = ["OVERLONG", "is_overlong", "overlong_edges", "overlong_mode", "overlong_penalty"]

OVERLONG: Final = "overlong"
"""The name of the penalty among the rewards, its rule, and the drop reason of masked calls."""

_GREATEST_PENALTY: Final = 1.0
"""Penalty of an answer beyond the limit, equation 13."""


def overlong_mode(settings: DatasetSettings) -> str:
    """`keep`, `mask` or `punish`. Raises UsageError for a penalty that would have no effect."""
    if settings.overlong_penalty is not None and settings.overlong != "punish":
        raise UsageError(
            f"overlong_penalty = {settings.overlong_penalty:g} has no effect: overlong is {settings.overlong!r}; "
            "set overlong = 'punish', or leave it out"
        )
    return settings.overlong


def overlong_penalty(settings: DatasetSettings) -> float | None:
    """The penalty of a call that ends by length; None without a penalty. Raises UsageError if it is not above 0."""
    if overlong_mode(settings) != "punish":
        return None
    penalty = _GREATEST_PENALTY if settings.overlong_penalty is None else settings.overlong_penalty
    if not 0 < penalty < float("inf"):
        raise UsageError(f"overlong_penalty = {penalty:g} must be a number greater than 0: it is subtracted")
    return penalty


def is_overlong() -> pl.Expr:
    """Whether a call (CALLS) ended by length."""
    return pl.col("finish_reason") == "length"


def overlong_edges(penalty: float, calls: pl.DataFrame) -> pl.DataFrame:
    """EDGES with the penalty of each of CALLS that ended by length; the caller leaves out answers that are not penalized."""
    return (
        calls.filter(is_overlong() & pl.col("rollout_id").is_not_null())
        .select(
            *ROLLOUT_KEY,
            pl.lit(OVERLONG).alias("rule"),
            pl.col("trace_id").alias("call_trace_id"),
            pl.col("span_id").alias("call_span_id"),
            pl.lit(OVERLONG).alias("name"),
            pl.lit(-penalty).alias("score"),
            pl.lit("trace").alias("source"),
            pl.col("end_ns").alias("time_ns"),
        )
        .select(pl.col(column).cast(kind) for column, kind in EDGES.items())
    )

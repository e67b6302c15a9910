"""The range of rewards: one that is far outside would outweigh all others, or overflow in sums of squares."""

import math
from typing import Final

import polars as pl

from trainspan_schemas.errors import UsageError

__all__ = ["check_max_reward", "is_outside"]

_HIGHEST: Final = 1e100
"""The sum of the squares of a billion rewards is still finite."""


def check_max_reward(limit: float) -> float:
    """Returns `[advanced] dataset.max_reward`. Raises UsageError for a limit that is none."""
    if not 0 < limit <= _HIGHEST or not math.isfinite(limit):
        raise UsageError(f"max_reward = {limit:g}: it must be positive and at most {_HIGHEST:g}")
    return limit


def is_outside(value: pl.Expr, limit: float) -> pl.Expr:
    """Whether a value is beyond the limit in either direction, or no number; a missing one is not."""
    return ~(value.is_finite() & (value.abs() <= limit)).fill_null(value=True)

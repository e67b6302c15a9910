"""Counts of calls by rollout and reason."""

from typing import Final

import polars as pl

from trainspan_processing.tables import Schema

__all__ = ["NO_ROLLOUT", "REASON_COUNTS", "count_reasons"]

NO_ROLLOUT: Final = "trace:"
"""Prefix of the stand-in rollout id (`trace:<trace_id>`) for calls without a rollout."""

REASON_COUNTS: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "reason": pl.String,
    "calls": pl.UInt32,
    "first": pl.UInt32,
}
"""One row per rollout and reason (NULL: kept), with the number of its calls and the position of the first one. Calls without
a rollout are counted by trace."""


def count_reasons(calls: pl.DataFrame) -> pl.DataFrame:
    """REASON_COUNTS of calls with rollout_id, attempt, trace_id, `position` (u32) and `reason`."""
    owner = pl.coalesce("rollout_id", pl.format(NO_ROLLOUT + "{}", "trace_id"))
    return (
        calls.group_by(owner.alias("rollout_id"), pl.col("attempt").fill_null(0), "reason", maintain_order=True)
        .agg(pl.len().alias("calls"), pl.col("position").min().alias("first"))
        .select(pl.col(name).cast(kind) for name, kind in REASON_COUNTS.items())
    )

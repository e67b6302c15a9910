"""How long the answers of rollouts are."""

from collections.abc import Sequence

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import ROLLOUT_KEY, Schema

__all__ = ["read_lengths"]

_LENGTHS: Schema = {"rollout_id": pl.String, "attempt": pl.Int32, "tokens": pl.Int64}


def read_lengths(source: Source, rollout_ids: Sequence[str]) -> pl.DataFrame:
    """rollout_id, attempt, `tokens`: the sampled tokens of all its calls; no row for a rollout without tokens. Raises StoreError."""
    columns = ["rollout_id", "attempt", "completion_ids"]
    frames = [
        batch.select(
            "rollout_id",
            pl.col("attempt").cast(pl.Int32).fill_null(0),
            pl.col("completion_ids").list.len().cast(pl.Int64).alias("tokens"),
        )
        for batch in source.read("calls", Selection(rollout_ids=list(rollout_ids)), columns)
    ]
    calls = pl.concat([pl.DataFrame(schema=_LENGTHS), *frames])
    return calls.group_by(ROLLOUT_KEY).agg(pl.col("tokens").sum()).filter(pl.col("tokens") > 0)

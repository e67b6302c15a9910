"""The locations of an inventory's rollouts in each store, so that reading some rollouts need not scan the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.tables import Schema, empty

__all__ = ["EXTENT", "RolloutLocations"]

_MOST_RANGES: Final = 32
_NEAR_SEQS: Final = 2048
"""Ranges with a smaller gap between them are merged: about one row group."""

EXTENT: Final[Schema] = {"store": pl.UInt8, "rollout": pl.UInt64, "first_seq": pl.Int64, "last_seq": pl.Int64}


@dataclass(frozen=True, slots=True)
class RolloutLocations:
    """The locations of all spans in the traces of known rollouts, as of some moment."""

    rows: pl.DataFrame
    """EXTENT: ranges of `seq` that contain the spans; `rollout` is a hash of the rollout id and may collide."""
    seen: Mapping[int, int]
    """Store → its last `seq` at that moment."""

    @classmethod
    def of(cls, held: pl.DataFrame, seen: Mapping[int, int]) -> "RolloutLocations":
        """Built from store, rollout_id, trace_id, first_seq and last_seq, a row per rollout and trace."""
        if held.is_empty():
            return cls(empty(EXTENT), dict(seen))
        pairs = held.select("store", "trace_id", pl.col("rollout_id").hash().alias("rollout")).unique()
        ranges = held.select("store", "trace_id", "first_seq", "last_seq").unique()
        rows = pairs.join(ranges, on=["store", "trace_id"]).select(*EXTENT)
        return cls(rows.unique(), dict(seen))

    def parameters(self, store: int, rollout_ids: Sequence[str]) -> dict[str, object]:
        """Parameters that limit a read of these rollouts to their locations; empty if one of them is unknown."""
        wanted = pl.Series("rollout", rollout_ids, dtype=pl.String).hash().unique()
        found = self.rows.filter(pl.col("rollout").is_in(wanted.implode()))
        if store not in self.seen or found["rollout"].n_unique() < len(wanted):
            return {}
        ranges = found.filter(pl.col("store") == store).select("first_seq", "last_seq").sort("first_seq")
        return {"spans_within": _merged(ranges), "seen_seq": self.seen[store]}


def _merged(ranges: pl.DataFrame) -> list[list[int]]:
    """At most _MOST_RANGES ranges that cover the given sorted ones; only the widest gaps are left out."""
    if ranges.is_empty():
        return []
    gap = pl.col("first_seq") - pl.col("last_seq").cum_max().shift(1)
    gaps = ranges.select(gap.alias("gap"))["gap"]
    least = max(_NEAR_SEQS, *gaps.top_k(_MOST_RANGES).slice(_MOST_RANGES - 1, 1).drop_nulls(), 0)
    run = ranges.with_columns((gaps > least).fill_null(False).cum_sum().alias("run"))
    merged = run.group_by("run", maintain_order=True).agg(pl.col("first_seq").min(), pl.col("last_seq").max())
    return [list(row) for row in merged.select("first_seq", "last_seq").iter_rows()]

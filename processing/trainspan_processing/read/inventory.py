"""The rollouts of a selection and their sizes, read before anything else.

A store is processed in chunks of whole rollouts, so that memory depends on the chunk and not on the store.
"""

from dataclasses import dataclass, replace
from typing import Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import ROLLOUT_KEY, Schema, compact, empty

__all__ = ["Inventory", "spans_per_chunk", "take_inventory"]

_SMALLEST_CHUNK: Final = 40_960
_LARGEST_CHUNK: Final = 147_456

_IDENTITY: Final = ["run_id", "round", "task_id"]
_KEY: Final = [*ROLLOUT_KEY, "trace_id", *_IDENTITY]
_PLACE: Final = ["store", "first_seq"]
_HOLDINGS: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "trace_id": pl.String,
    "run_id": pl.String,
    "round": pl.Int32,
    "task_id": pl.String,
    "calls": pl.UInt32,
    "spans": pl.UInt32,
}
_READ: Final[Schema] = {**_HOLDINGS, "first_seq": pl.Int64, "is_selected": pl.Boolean}
"""Columns requested from the read `holdings`."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The rollouts of a selection, with their sizes."""

    holdings: pl.DataFrame
    """rollout_id, attempt, trace_id, run_id, round, task_id, `calls` and other `spans` (u32), `store` and `first_seq` of the first of
    them, `is_late` (whether all of it came after the selection's places): one row per trace and identity."""
    elsewhere: pl.DataFrame
    """rollout_id, `store`: the further stores that have spans of a rollout."""
    evaluated: pl.DataFrame | None = None
    """The same for evaluations; None if it is not known."""

    def calls_of(self, rollouts: pl.DataFrame) -> pl.DataFrame:
        """rollout_id, attempt and the number of `calls` (u32) of each of `rollouts`."""
        counted = self.holdings.group_by(ROLLOUT_KEY).agg(pl.col("calls").sum().cast(pl.UInt32))
        return counted.join(rollouts, on=ROLLOUT_KEY, how="semi").select(*ROLLOUT_KEY, "calls")

    def without(self, rollouts: pl.DataFrame) -> "Inventory":
        """The inventory without these (rollout_id, attempt), unless they share a trace with another rollout."""
        others = self.holdings.join(rollouts, on=ROLLOUT_KEY, how="anti")
        if others.height == self.holdings.height:
            return self
        return self.of(others.select("rollout_id"))

    def since(self, selection: Selection) -> "Inventory":
        """Only the rollouts since the round and the place of a selection, and those that share a trace with one.

        A rollout without a round is of any round; it came when its first span was stored in any store.
        """
        late = self.holdings
        if selection.since_round is not None:
            late = late.filter((pl.col("round") >= selection.since_round).fill_null(True))
        if selection.since_seq is not None:
            late = late.filter(pl.col("is_late").all().over(ROLLOUT_KEY))
        return self if late.height == self.holdings.height else self.of(late.select("rollout_id"))

    def of(self, rollouts: pl.DataFrame) -> "Inventory":
        """Only the rollouts with these `rollout_id`s, and rollouts that share a trace with one of them."""
        related = _related(self.holdings)
        relations = related.join(rollouts, on="rollout_id", how="semi").select("relation")
        chosen = related.join(relations, on="relation", how="semi").select("rollout_id")
        return replace(self, holdings=self.holdings.join(chosen, on="rollout_id", how="semi"))

    def sizes(self) -> pl.DataFrame:
        """rollout_id and its number of stored `items` (u32): calls and other spans."""
        items = (pl.col("calls").sum() + pl.col("spans").sum()).cast(pl.UInt32).alias("items")
        return self.holdings.group_by("rollout_id").agg(items)

    def chunks(self, selection: Selection) -> list[Selection]:
        """The selection in chunks of about `spans_per_chunk` spans, by run and round, that lie near each other in the stores.

        Rollouts that share a trace stay together, since a call's ancestors may be part of another rollout. A chunk is read only
        from the stores that have something of it, if they are known.
        """
        sized = self.holdings.group_by("rollout_id").agg(
            pl.col("run_id", "round").drop_nulls().first(),
            pl.col(*_PLACE).min(),
            (pl.col("calls").sum() + pl.col("spans").sum()).alias("size"),
        )
        order = ["run_id", "round", *_PLACE, "rollout_id"]
        sized = sized.join(_related(self.holdings), on="rollout_id").sort(order)
        sized = sized.with_columns((pl.col("size").cum_sum() - pl.col("size")).alias("before"))
        limit = spans_per_chunk(int(sized["size"].sum()))
        chunk = (pl.col("before").first().over("relation") // limit).alias("chunk")
        parts = sized.with_columns(chunk).sort("chunk", maintain_order=True)
        return [
            replace(selection, rollout_ids=part["rollout_id"].to_list(), stores=self._stores_of(part))
            for part in parts.partition_by("chunk", maintain_order=True)
        ]

    def _stores_of(self, rollouts: pl.DataFrame) -> list[int] | None:
        """`rollouts` has the first `store` of each."""
        if self.evaluated is None:
            return None
        further = [frame.join(rollouts, on="rollout_id", how="semi") for frame in (self.elsewhere, self.evaluated)]
        return sorted({int(store) for frame in (rollouts, *further) for store in frame["store"].unique()})


def spans_per_chunk(spans: int) -> int:
    """The chunk size for a given total number of spans: the more calls are kept in memory, the less remains for a chunk."""
    return max(_SMALLEST_CHUNK, _LARGEST_CHUNK - spans // 16)


def take_inventory(source: Source, selection: Selection) -> Inventory:
    """Counts the content of the selection."""
    batches = [
        batch.with_columns(pl.col("attempt").fill_null(0)).select(
            "store", *(pl.col(name).cast(kind) for name, kind in _READ.items())
        )
        for batch in source.read("holdings", selection, list(_READ))
    ]
    rows = pl.concat(batches) if batches else empty({"store": pl.UInt8, **_READ})
    shown = rows.filter(pl.col("is_selected") & source.is_within("first_seq"))
    since = pl.col("store").replace_strict(dict(enumerate(selection.since_seq or ())), default=0, return_dtype=pl.Int64)
    counted = shown.group_by(_KEY, maintain_order=True).agg(
        pl.col("calls", "spans").sum(), pl.col(*_PLACE).min(), (pl.col("first_seq") > since).all().alias("is_late")
    )
    is_first = pl.col("store") == pl.col("store").min().over("rollout_id")
    return Inventory(compact(counted), shown.filter(~is_first).select("rollout_id", "store").unique())


def _ends(steps: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
    """Each `relation`, and where one comes from it by steps to `least` that end in a relation whose step is to itself."""
    while True:
        further = steps.with_columns(pl.col("least").replace(steps["relation"], steps["least"]))
        if further["least"].equals(steps["least"]):
            return steps["relation"], steps["least"]
        steps = further


def _related(holdings: pl.DataFrame) -> pl.DataFrame:
    """rollout_id and `relation`: the least id among rollouts that it shares a trace with, directly or transitively."""
    pairs = holdings.select("rollout_id", "trace_id").unique()
    alone = pairs.select("rollout_id").unique().with_columns(pl.col("rollout_id").alias("relation"))
    shared = pairs.filter(pl.len().over("trace_id") > 1)
    if shared.is_empty():
        return alone
    linked = pairs.join(shared, on="rollout_id", how="semi").with_columns(pl.col("rollout_id").alias("relation"))
    while True:
        nearer = linked.with_columns(pl.col("relation").min().over("trace_id").alias("least"))
        steps = nearer.group_by("relation").agg(pl.col("least").min())
        if steps["least"].equals(steps["relation"]):
            break
        linked = linked.with_columns(pl.col("relation").replace(*_ends(steps)))
    joined = linked.select("rollout_id", "relation").unique()
    return pl.concat([alone.join(joined, on="rollout_id", how="anti"), joined])

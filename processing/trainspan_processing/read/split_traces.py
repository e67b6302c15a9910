"""Traces with spans in several stores.

Senders that choose a collector by the rollout leave none. Others may: a rollout whose spans lack its id is known only in the
store of its other spans.
"""

from dataclasses import replace
from typing import Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_schemas.artifacts.manifest import SplitTraces

__all__ = ["split_traces"]

_EXAMPLES: Final = 5


def split_traces(source: Source, selection: Selection) -> SplitTraces:
    """The number of `traces` with spans in several stores, and as `examples` up to five with their stores, for a manifest.

    Counts the traces of selected rollouts and those of spans without a rollout, if part of them came after the selection's places.
    """
    if len(source.stores) < 2:
        return {"traces": 0, "examples": []}
    places = dict(enumerate(selection.since_seq or ()))
    is_late = pl.col("seq") > pl.col("store").replace_strict(places, default=0, return_dtype=pl.Int64)
    frames = [
        batch.filter(pl.col("is_selected") & source.is_within("first_seq")).rename({"first_seq": "seq"})
        for batch in source.read("holdings", selection, ["trace_id", "first_seq", "is_selected"])
    ]
    alone = replace(selection, rollout_ids=None, without_rollout=True)
    frames += source.read("spans", alone, ["trace_id", "seq"])
    if not frames:
        return {"traces": 0, "examples": []}
    parts = pl.concat([batch.group_by("trace_id", "store").agg(is_late.any()) for batch in frames])
    traces = parts.group_by("trace_id").agg(pl.col("store").unique().sort(), pl.col("seq").any().alias("is_late"))
    split = traces.filter((pl.col("store").list.len() > 1) & pl.col("is_late")).sort("trace_id")
    examples = [
        {"trace_id": trace_id, "stores": [source.stores[number] for number in numbers]}
        for trace_id, numbers, _ in split.head(_EXAMPLES).iter_rows()
    ]
    return {"traces": split.height, "examples": examples}

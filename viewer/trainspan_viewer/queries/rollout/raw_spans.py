"""The stored spans of a rollout as they are, page by page."""

import json
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import SPAN_KEY
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.places import NotFoundError
from trainspan_viewer.queries.questions.links import Links
from trainspan_viewer.queries.questions.parts import part_of
from trainspan_viewer.queries.rollout.conversation import Text
from trainspan_viewer.queries.rollout.explained import asked_of
from trainspan_viewer.queries.sources import Sources

__all__ = ["PAGE", "RawSpan", "SpansModel", "load_spans"]

PAGE: Final = 20
_MOST_CHARACTERS: Final = 10_000
"""Characters of one span's attributes."""
_PLACES: Final = ["seq", "trace_id", "span_id", "parent_span_id", "start_ns"]
"""What is read of all spans of the rollout if they are not too many, else of those of the page."""
_MOST_PLACES: Final = 10_000
"""Up to this many spans, the ancestors of each are known."""
_MOST_LENGTH: Final = 4_000_000
"""Characters of attributes that are read whole: of longer ones only the beginning is."""
_FACTS: Final = (
    "trace_id, span_id, left(name, 300) AS name, left(service_name, 300) AS service_name, end_ns, status_code,"
    f" length(attributes) AS length, CASE WHEN length(attributes) <= {_MOST_LENGTH} THEN attributes"
    f" ELSE left(attributes, {_MOST_CHARACTERS}) END AS attributes"
)


@dataclass(frozen=True, slots=True)
class RawSpan:
    """One span."""

    name: str
    service: str | None
    trace_id: str
    span_id: str
    parent_span_id: str | None
    depth: int
    """Number of ancestors among the rollout's spans."""
    start_s: float
    """Seconds since the first span began."""
    seconds: float | None
    failed: bool
    attributes: Text
    """JSON, one attribute per line."""


@dataclass(frozen=True, slots=True)
class SpansModel:
    """The page of spans from number `start` of `total`, in the order of their start."""

    rollout_id: str
    spans: list[RawSpan]
    start: int
    total: int
    is_part: bool
    """Whether only the spans of the page were read: `depth` then counts only ancestors among them."""
    params: Params
    above: str
    """Address of the rollout."""


def load_spans(sources: Sources, params: Params) -> SpansModel:
    """Raises NotFoundError if the rollout is not stored."""
    rollout_id = params.text("rollout")
    asked = asked_of(sources, params, rollout_id)
    start = params.integer("start", 0, most=10**7)
    selection = Selection(rollout_ids=[rollout_id])
    with Source(asked.question.stores, allow_behind=True) as source:
        rows, total = part_of(source, "spans", selection, _PLACES, start=start, most=PAGE)
        page, first = rows, rows
        if 0 < total <= _MOST_PLACES:
            rows = pl.concat(source.read("spans", selection, _PLACES)).sort("start_ns", "seq")
            page, first = rows.slice(start, PAGE), rows
        elif total and start:
            first, _ = part_of(source, "spans", selection, _PLACES, start=0, most=1)
        page = _with_facts(source, page)
    if not total:
        raise NotFoundError(f"no spans of rollout {rollout_id!r} in the store")
    depths = _depths(rows)
    earliest = first["start_ns"].min() if first.height else 0
    began = earliest if isinstance(earliest, int) else 0
    spans = [
        RawSpan(
            name=row["name"] or "",
            service=row["service_name"],
            trace_id=row["trace_id"],
            span_id=row["span_id"],
            parent_span_id=row["parent_span_id"],
            depth=depths[row["trace_id"], row["span_id"]],
            start_s=(row["start_ns"] - began) / 1e9,
            seconds=None if row["end_ns"] is None else (row["end_ns"] - row["start_ns"]) / 1e9,
            failed=row["status_code"] == 2,
            attributes=_pretty(row["attributes"], row["length"]),
        )
        for row in page.iter_rows(named=True)
    ]
    return SpansModel(
        rollout_id,
        spans,
        start,
        total,
        total > _MOST_PLACES,
        params,
        Links.of_question(asked).of(f"/rollouts/{quote(rollout_id, safe='')}"),
    )


def _with_facts(source: Source, page: pl.DataFrame) -> pl.DataFrame:
    """The spans with _FACTS; one that was deleted meanwhile is left out."""
    if page.is_empty():
        return page
    numbers = ", ".join(map(str, page["seq"].to_list()))
    facts = pl.concat(source.query(f"SELECT {_FACTS} FROM spans WHERE seq IN ({numbers})")).drop("store", strict=False)
    return page.join(facts.unique(SPAN_KEY), on=SPAN_KEY, how="inner", maintain_order="left")


def _depths(rows: pl.DataFrame) -> dict[tuple[str, str], int]:
    parents = (
        {(row[0], row[1]): (row[0], row[2]) for row in rows.select("trace_id", "span_id", "parent_span_id").iter_rows()}
        if rows.height
        else {}
    )
    depths: dict[tuple[str, str], int] = {}
    for span, parent in parents.items():
        depth, above = 0, parent
        while above in parents and depth < 30:  # a forged parent may be its own ancestor
            depth, above = depth + 1, parents[above]
        depths[span] = depth
    return depths


def _pretty(attributes: str | None, length: int | None) -> Text:
    if attributes is not None and length is not None and length > len(attributes):
        return Text(attributes, length - len(attributes))
    try:
        said = json.loads(attributes or "{}")
    except ValueError:
        return Text.of(attributes or "", _MOST_CHARACTERS)
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(said.items())]
    return Text.of("\n".join(lines), _MOST_CHARACTERS)

"""The stored spans of one attempt of a rollout as they are, page by page."""

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import SPAN_KEY
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.requests.links import Links
from trainspan_viewer.queries.requests.parts import part_of
from trainspan_viewer.queries.rollout.conversation import Text
from trainspan_viewer.queries.rollout.explained import request_of
from trainspan_viewer.queries.sources import Sources

__all__ = ["PAGE", "RawSpan", "SpansModel", "load_spans"]

PAGE: Final = 20
_MOST_CHARACTERS: Final = 10_000
"""Characters of one span's attributes."""
_PLACES: Final = ["seq", "trace_id", "span_id", "parent_span_id", "start_ns"]
"""What is read of all spans of the rollout if they are not too many, else of those of the page."""
_MOST_PLACES: Final = 10_000
"""Up to this many spans, the ancestors of each are known."""
_MOST_TRACES: Final = 500
"""Up to this many traces, their other spans are counted."""
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
    """The page of spans from number `start` of `total`, each followed by its children, in the order of their start."""

    rollout_id: str
    attempt: int
    attempts: list[int]
    """All of them, the last one first."""
    n_others: int | None
    """Spans in the attempt's traces that are of another attempt or rollout, or of none; None: they were not counted."""
    shared: list[str]
    """The traces with such spans."""
    spans: list[RawSpan]
    start: int
    total: int
    is_part: bool
    """Whether only the spans of the page were read: pages then go by start, and only parents on the page are known."""
    params: Params
    above: str
    """Address of the rollout."""


def load_spans(sources: Sources, params: Params) -> SpansModel:
    """The spans of the attempt in the address, else of the last one. Raises NotFoundError if it is not stored."""
    rollout_id = params.text("rollout")
    request = request_of(sources, params, rollout_id)
    start = params.integer("start", 0, most=10**7)
    selection = Selection(rollout_ids=[rollout_id])
    attempt = params.integer("attempt", -1, least=-1, most=10**6)
    n_others, shared = None, list[str]()
    with Source(request.question.stores, allow_behind=True) as source:
        attempts = _attempts(source, selection, rollout_id)
        attempt = max(attempts, default=0) if attempt < 0 else attempt
        rows, total = part_of(source, "spans", selection, _PLACES, start=start, most=PAGE, attempt=attempt)
        page, first = _in_tree_order(rows), rows
        if 0 < total <= _MOST_PLACES:
            first = pl.concat(source.read("spans", selection, _PLACES, attempt=attempt)).sort("start_ns", "seq")
            page = _in_tree_order(first).slice(start, PAGE)
            n_others, shared = _others(source, first)
        elif total and start:
            first, _ = part_of(source, "spans", selection, _PLACES, start=0, most=1, attempt=attempt)
        page = _with_facts(source, page)
    if not total:
        raise NotFoundError(f"no spans of attempt {attempt} of rollout {rollout_id!r} in the store")
    earliest = first["start_ns"].min() if first.height else 0
    began = earliest if isinstance(earliest, int) else 0
    spans = [
        RawSpan(
            name=row["name"] or "",
            service=row["service_name"],
            trace_id=row["trace_id"],
            span_id=row["span_id"],
            parent_span_id=row["parent_span_id"],
            depth=row["depth"],
            start_s=(row["start_ns"] - began) / 1e9,
            seconds=None if row["end_ns"] is None else (row["end_ns"] - row["start_ns"]) / 1e9,
            failed=row["status_code"] == 2,
            attributes=_pretty(row["attributes"], row["length"]),
        )
        for row in page.iter_rows(named=True)
    ]
    return SpansModel(
        rollout_id,
        attempt,
        attempts,
        n_others,
        shared,
        spans,
        start,
        total,
        total > _MOST_PLACES,
        params,
        Links.of_request(request).of(rollout_id),
    )


def _attempts(source: Source, selection: Selection, rollout_id: str) -> list[int]:
    """The attempts of the rollout, the last one first; `holdings` has those of other rollouts in its traces, too."""
    attempts: set[int] = set()
    for batch in source.read("holdings", selection, ["rollout_id", "attempt"]):
        of_rollout = batch.filter(pl.col("rollout_id") == rollout_id)
        attempts.update(of_rollout["attempt"].fill_null(0).unique().to_list())
    return sorted(attempts, reverse=True)


def _others(source: Source, spans: pl.DataFrame) -> tuple[int | None, list[str]]:
    """How many other spans the traces of all these spans have, and which traces; not of more than _MOST_TRACES."""
    traces = spans["trace_id"].unique(maintain_order=True).to_list()
    if len(traces) > _MOST_TRACES:
        return None, []
    # What arrived after `spans` were read may be of the same attempt.
    is_as_old = pl.col("seq") <= pl.col("store").replace_strict(source.watermarks, default=0, return_dtype=pl.Int64)
    n_others, shared = 0, dict[str, None]()
    for batch in source.texts(traces, ["seq", *SPAN_KEY]):
        others = batch.filter(is_as_old).join(spans, on=SPAN_KEY, how="anti")
        n_others += others.height
        shared |= dict.fromkeys(others["trace_id"].unique(maintain_order=True).to_list())
    return n_others, list(shared)


def _with_facts(source: Source, page: pl.DataFrame) -> pl.DataFrame:
    """The spans with _FACTS; one that was deleted meanwhile is left out."""
    if page.is_empty():
        return page
    numbers = ", ".join(map(str, page["seq"].to_list()))
    facts = pl.concat(source.query(f"SELECT {_FACTS} FROM stored.live_spans WHERE seq IN ({numbers})")).drop(
        "store", strict=False
    )
    return page.join(facts.unique(SPAN_KEY), on=SPAN_KEY, how="inner", maintain_order="left")


def _in_tree_order(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows` with `depth`, each parent right before its children; siblings keep their order."""
    if rows.is_empty():
        return rows
    spans, children = list(rows.select(SPAN_KEY).iter_rows()), defaultdict[tuple[str, str], list[int]](list)
    known, roots = set(spans), list[int]()
    for row, parent in enumerate(rows.select("trace_id", "parent_span_id").iter_rows()):
        (children[parent] if parent in known else roots).append(row)
    depths: dict[int, int] = {}
    for root in (*roots, *range(len(spans))):  # a forged parent may be its own ancestor: then there is no root
        pending = [(root, 0)]
        while pending:
            row, depth = pending.pop()
            if row not in depths:
                depths[row] = depth
                pending += [(child, depth + 1) for child in reversed(children[spans[row]])]
    return rows[list(depths)].with_columns(pl.Series("depth", list(depths.values()), pl.Int64))


def _pretty(attributes: str | None, length: int | None) -> Text:
    if attributes is not None and length is not None and length > len(attributes):
        return Text(attributes, length - len(attributes))
    try:
        values = json.loads(attributes or "{}")
    except ValueError:
        return Text.of(attributes or "", _MOST_CHARACTERS)
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(values.items())]
    return Text.of("\n".join(lines), _MOST_CHARACTERS)

"""Inserts a batch into DuckDB: in one transaction with the journal position, and without what is already stored.

The table `stored.places` says in which parts of the store the rows of a trace and of a rollout are, so that readers of some
rollouts need not search the others. A place is PLACE_ROWS numbers (`seq`) wide, about four row groups, and is added when it is
complete; readers always look at the rows after the last place. Ids are stored as hashes: if two are equal, or a row was deleted,
readers search a place without result.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import duckdb
import pyarrow as pa

from trainspan_collector.journal.segments import LoadProgress
from trainspan_collector.rows.batch import Tables
from trainspan_collector.rows.same_span import FACTS, SpanFacts, are_distinct, standing
from trainspan_collector.store.key_index import Copy, KeyIndex
from trainspan_collector.store.row_groups import RowGroups

__all__ = ["PLACES_TABLE", "PLACE_ROWS", "Loaded", "add_places", "drop_empty_places", "lacking_places", "load"]

log = logging.getLogger(__name__)

PLACE_ROWS: Final = 8192
PLACES_TABLE: Final = "CREATE TABLE stored.places (place BIGINT, trace_key UBIGINT, rollout_key UBIGINT)"
"""A row for each combination of them; a key is 0 if a row has no trace or no rollout."""

_PLACES: Final = """
SELECT place, coalesce(md5_number_lower(trace_id), 0) AS trace_key, coalesce(md5_number_lower(rollout_id), 0) AS rollout_key
FROM (
    SELECT DISTINCT seq // {width} AS place, trace_id, rollout_id FROM (
        SELECT seq, trace_id, rollout_id FROM stored.spans
        UNION ALL SELECT seq, trace_id, rollout_id FROM stored.logs
        UNION ALL SELECT seq, trace_id, rollout_id FROM stored.evaluations
    )
    WHERE seq >= {first} AND seq < {end}
)"""
"""SQL of the places of the rows from number `first` to `end`, exclusive."""
_ADDED: Final = "SELECT coalesce(max(place) + 1, 0) FROM stored.places"


@dataclass(frozen=True, slots=True)
class _Inserted:
    """Rows of one table, in the form that the index takes."""

    rows: Mapping[bytes, Copy]
    n_duplicates: int
    n_collisions: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a batch."""

    n_duplicates: int
    """Rows that were in the batch or in the store already."""
    n_collisions: int
    """Spans that have the ids of another span."""


def load(
    cursor: duckdb.DuckDBPyConnection, index: KeyIndex, groups: RowGroups, rows: Tables, progress: LoadProgress
) -> Loaded:
    """Commits `rows` and `progress`.

    `index` must cover the store. Raises duckdb.Error or KeyIndexError; the caller then rolls back.
    """
    cursor.execute("BEGIN")
    tables = {"spans": rows.spans, "logs": rows.logs, "evaluations": rows.evaluations}
    inserted = [
        _insert(cursor, index, groups, name, incoming) for name, incoming in tables.items() if incoming is not None
    ]
    add_places(cursor, progress.last_seq)
    cursor.execute(
        "UPDATE stored.progress SET segment = ?, byte_offset = ?, last_seq = ?",
        [progress.position.segment, progress.position.offset, progress.last_seq],
    )
    cursor.execute("COMMIT")
    index.add({key: copy for part in inserted for key, copy in part.rows.items()}, progress.last_seq)
    return Loaded(
        rows.n_duplicates + sum(part.n_duplicates for part in inserted), sum(part.n_collisions for part in inserted)
    )


def add_places(cursor: duckdb.DuckDBPyConnection, last_seq: int) -> None:
    """Adds the places that are complete if all rows up to `last_seq` are stored. Raises duckdb.Error."""
    [(first,)] = cursor.execute(_ADDED).fetchall()
    end = (last_seq + 1) // PLACE_ROWS
    if first < end:
        rows = _PLACES.format(width=PLACE_ROWS, first=PLACE_ROWS * first, end=PLACE_ROWS * end)
        cursor.execute(f"INSERT INTO stored.places {rows}")


def lacking_places() -> str:
    """SQL of the number of places that the table should have and does not."""
    rows = _PLACES.format(width=PLACE_ROWS, first=0, end=f"{PLACE_ROWS} * ({_ADDED})")
    return f"SELECT count(*) FROM ({rows}) ANTI JOIN stored.places USING (place, trace_key, rollout_key)"


def drop_empty_places(cursor: duckdb.DuckDBPyConnection) -> None:
    """Deletes the places that have no rows any more. Raises duckdb.Error."""
    every = "FROM stored.spans UNION ALL SELECT seq FROM stored.logs UNION ALL SELECT seq FROM stored.evaluations"
    used = f"SELECT DISTINCT seq // {PLACE_ROWS} FROM (SELECT seq {every}) WHERE seq IS NOT NULL"
    cursor.execute(f"DELETE FROM stored.places WHERE place NOT IN ({used})")


def _insert(
    cursor: duckdb.DuckDBPyConnection, index: KeyIndex, groups: RowGroups, table: str, incoming: pa.Table
) -> _Inserted:
    """Inserts what is new or replaces what is stored."""
    copies = index.copies(cursor, table, incoming)
    rows = _best(copies)
    stored = index.find(rows)
    if table == "spans" and (_n_collisions(incoming) or any(_may_differ(rows[key], stored[key]) for key in stored)):
        incoming = _with_collisions(cursor, index, incoming)
        copies = index.copies(cursor, table, incoming)
        rows = _best(copies)
        stored = index.find(rows)
    new = {key: copy for key, copy in rows.items() if key not in stored or copy.replaces(stored[key])}
    if replaced := [(stored[key].seq, copy.seq) for key, copy in new.items() if key in stored]:
        seqs, by_seqs = zip(*replaced, strict=True)
        cursor.from_arrow(pa.table({"seq": seqs, "by_seq": by_seqs})).insert_into("stored.superseded")
    if len(new) < incoming.num_rows:
        incoming = incoming.filter(pa.array([key in new and new[key].seq == copy.seq for key, copy in copies]))
    groups.insert(cursor, table, incoming)
    n_collisions = _warned_of_collisions(incoming) if table == "spans" else 0
    return _Inserted(new, len(copies) - len(rows) + len(stored), n_collisions)


def _best(copies: Sequence[tuple[bytes, Copy]]) -> dict[bytes, Copy]:
    """The copy of each key that stays: marks of distinct rows of a batch may be equal."""
    best: dict[bytes, Copy] = {}
    for key, copy in copies:
        if key not in best or copy.replaces(best[key]):
            best[key] = copy
    return best


def _warned_of_collisions(spans: pa.Table) -> int:
    """The number of spans that have the ids of another one; a warning names the first."""
    if count := _n_collisions(spans):
        first = spans.filter(spans.column("collides")).slice(0, 1).select(["trace_id", "span_id"]).to_pylist()[0]
        log.warning(
            "id_collision spans=%d: distinct spans have one id, first trace_id=%s span_id=%s", count, *first.values()
        )
    return count


def _n_collisions(spans: pa.Table) -> int:
    return int(spans.num_rows - spans.column("collides").null_count)


def _may_differ(first: Copy, other: Copy) -> bool:
    return first.mark != other.mark and standing(first.rank) == standing(other.rank)


def _with_collisions(cursor: duckdb.DuckDBPyConnection, index: KeyIndex, spans: pa.Table) -> pa.Table:
    """The spans of a batch with `collides` set on those that have the ids of another span in the batch or in the store."""
    column = spans.schema.get_field_index("collides")
    flags = spans.column(column).to_pylist()
    copies = index.copies(cursor, "spans", spans.set_column(column, "collides", pa.nulls(len(flags), pa.bool_())))
    stored = index.find({key for key, _ in copies})
    suspects = {
        row: None
        for row, (key, copy) in enumerate(copies)
        if flags[row] or (key in stored and _may_differ(copy, stored[key]))
    }
    stored_facts = _stored_facts(cursor, [stored[copies[row][0]].seq for row in suspects if copies[row][0] in stored])
    facts = list(map(SpanFacts, *(spans.column(name).to_pylist() for name in FACTS)))
    taken = {key for row, (key, _) in enumerate(copies) if row not in suspects}
    for row in suspects:
        key, copy = copies[row]
        if key in stored:
            first = stored_facts[stored[key].seq]
            is_other = _may_differ(copy, stored[key]) and are_distinct(facts[row], first)
            flags[row] = True if is_other or key in taken else None
            if not is_other:
                taken.add(key)
    return spans.set_column(column, "collides", pa.array(flags, pa.bool_()))


def _stored_facts(cursor: duckdb.DuckDBPyConnection, seqs: list[int]) -> dict[int, SpanFacts]:
    """Reads one stretch of rows for each place that has one: a range over all of them could be the whole store."""
    facts: dict[int, SpanFacts] = {}
    for _, places in groupby(sorted(seqs), lambda seq: seq // PLACE_ROWS):
        near = list(places)
        condition = f"seq BETWEEN {near[0]} AND {near[-1]} AND seq IN (SELECT unnest($seqs::BIGINT[]))"
        rows = cursor.execute(f"SELECT seq, {', '.join(FACTS)} FROM stored.spans WHERE {condition}", {"seqs": near})
        facts |= {seq: SpanFacts(*values) for seq, *values in rows.fetchall()}
    return facts

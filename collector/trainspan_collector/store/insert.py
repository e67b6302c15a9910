"""Inserts a batch into DuckDB: in one transaction with the journal position, and without what is already stored.

The table `stored.places` says in which parts of the store the rows of a trace and of a rollout are, so that readers of some
rollouts need not search the others. A place is PLACE_ROWS numbers (`seq`) wide, about four row groups, and is added when it is
complete; readers always look at the rows after the last place. Ids are stored as hashes: if two are equal, or a row was deleted,
readers search a place without result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from trainspan_collector.journal.segments import LoadProgress
from trainspan_collector.rows.batch import Tables
from trainspan_collector.store.key_index import Copy, KeyIndex
from trainspan_collector.store.row_groups import RowGroups

__all__ = ["PLACES_TABLE", "PLACE_ROWS", "add_places", "drop_empty_places", "lacking_places", "load"]

PLACE_ROWS: Final = 8192
PLACES_TABLE: Final = "CREATE TABLE IF NOT EXISTS stored.places (place BIGINT, trace_key UBIGINT, rollout_key UBIGINT)"
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


def load(
    cursor: duckdb.DuckDBPyConnection, index: KeyIndex, groups: RowGroups, rows: Tables, progress: LoadProgress
) -> int:
    """Commits `rows` and `progress`; the number of rows that were in the batch or in the store already.

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
    return rows.n_duplicates + sum(part.n_duplicates for part in inserted)


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
    """Inserts what is new or of greater rank than what is stored."""
    rows = index.copies(cursor, table, incoming)
    stored = index.find(rows)
    kept = {key: copy for key, copy in rows.items() if key not in stored or copy.rank > stored[key].rank}
    if replaced := [(stored[key].seq, copy.seq) for key, copy in kept.items() if key in stored]:
        seqs, by_seqs = zip(*replaced, strict=True)
        cursor.from_arrow(pa.table({"seq": seqs, "by_seq": by_seqs})).insert_into("stored.superseded")
    if len(kept) < incoming.num_rows:
        incoming = incoming.filter(pa.array([key in kept for key in rows]))
    groups.insert(cursor, table, incoming)
    return _Inserted(kept, len(stored))

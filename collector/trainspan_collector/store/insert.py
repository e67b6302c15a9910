"""Inserts a batch into DuckDB: in one transaction with the journal position, and without what is already stored."""

from collections.abc import Mapping
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from trainspan_collector.journal.segments import Progress
from trainspan_collector.rows.batch import Tables
from trainspan_collector.store.key_index import Copy, KeyIndex
from trainspan_collector.store.row_groups import RowGroups

__all__ = ["load"]


@dataclass(frozen=True, slots=True)
class _Inserted:
    """Rows of one table, in the form that the index takes."""

    rows: Mapping[bytes, Copy]
    n_duplicates: int


def load(
    cursor: duckdb.DuckDBPyConnection, index: KeyIndex, groups: RowGroups, rows: Tables, progress: Progress
) -> int:
    """Commits `rows` and `progress`; the number of rows that were in the batch or in the store already.

    `index` must cover the store. Raises duckdb.Error or KeyIndexError; the caller then rolls back.
    """
    cursor.execute("BEGIN")
    tables = {"spans": rows.spans, "logs": rows.logs, "evaluations": rows.evaluations}
    inserted = [
        _insert(cursor, index, groups, name, incoming) for name, incoming in tables.items() if incoming is not None
    ]
    cursor.execute(
        "UPDATE stored.progress SET segment = ?, byte_offset = ?, last_seq = ?",
        [progress.position.segment, progress.position.offset, progress.last_seq],
    )
    cursor.execute("COMMIT")
    index.add({key: copy for part in inserted for key, copy in part.rows.items()}, progress.last_seq)
    return rows.n_duplicates + sum(part.n_duplicates for part in inserted)


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

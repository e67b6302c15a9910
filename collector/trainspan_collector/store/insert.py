"""Inserts a batch into DuckDB: in one transaction with the journal position, and without what is already stored."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import duckdb
import pyarrow as pa

from trainspan_collector.journal.segments import Progress
from trainspan_collector.rows.batch import Tables
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_collector.store.key_index import KeyIndex
from trainspan_collector.store.row_groups import RowGroups

__all__ = ["load"]

_SAME: Final = {
    "spans": """
SELECT i.seq, i.richness, s.seq, s.richness FROM (FROM stored.spans WHERE {near}) s
JOIN incoming i ON s.span_key = i.span_key AND s.trace_id = i.trace_id
""",
    "logs": """
SELECT i.seq, false, s.seq, false FROM (FROM stored.logs WHERE {near}) s
JOIN incoming i ON s.content_hash = i.content_hash
""",
    "evaluations": """
SELECT i.seq, (NOT i.untrusted, i.on_span), s.seq, (NOT s.untrusted, s.on_span) FROM (FROM stored.evaluations WHERE {near}) s
JOIN incoming i ON s.key = i.key
""",
}
"""Table → SQL of the rows with the same key: `seq` and rank of the new and of the stored one."""
_MOST_RANGES: Final = 64


@dataclass(frozen=True, slots=True)
class _Inserted:
    """Rows of one table, in the form that the index takes."""

    hashes: Sequence[bytes]
    seqs: Sequence[int]
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
    hashes = [key for part in inserted for key in part.hashes]
    index.add(hashes, [seq for part in inserted for seq in part.seqs], progress.last_seq)
    return rows.n_duplicates + sum(part.n_duplicates for part in inserted)


def _insert(
    cursor: duckdb.DuckDBPyConnection, index: KeyIndex, groups: RowGroups, table: str, incoming: pa.Table
) -> _Inserted:
    """Inserts what is new or of greater rank than what is stored."""
    cursor.register("incoming", incoming)
    try:
        hashes, seqs = index.hashes(cursor, table, "incoming"), incoming["seq"].to_pylist()
        known = {seq for seq in index.find(hashes) if seq is not None}
        found = cursor.execute(_SAME[table].format(near=_near(sorted(known)))).fetchall() if known else []
        pairs = [pair for pair in found if pair[2] in known]  # a row that it replaced may be nearby
        replaced = [old for _, new_rank, old, old_rank in pairs if new_rank > old_rank]
        dropped = {new for new, new_rank, _, old_rank in pairs if new_rank <= old_rank}
        if replaced:
            cursor.execute("INSERT INTO stored.superseded SELECT unnest(?)", [replaced])
    finally:
        with contextlib.suppress(duckdb.TransactionException):  # the transaction has failed; the next table replaces it
            cursor.unregister("incoming")
    if dropped:
        incoming = incoming.filter(pa.array([seq not in dropped for seq in seqs]))
    groups.insert(cursor, table, incoming)
    kept = [(key, seq) for key, seq in zip(hashes, seqs, strict=True) if seq not in dropped]
    return _Inserted([key for key, _ in kept], [seq for _, seq in kept], len(pairs))


def _near(seqs: Sequence[int]) -> str:
    """An SQL condition that is true for rows with these sorted numbers and few others: row groups without one are not read.

    Numbers from all over the store are searched for in one pass, since each range is compared with each row group.
    """
    starts = [seq for before, seq in pairwise([-ROW_GROUP_ROWS, *seqs]) if seq - before >= ROW_GROUP_ROWS]
    ends = [seq for seq, after in pairwise([*seqs, 2**63]) if after - seq >= ROW_GROUP_ROWS]
    ranges = [f"seq BETWEEN {first} AND {last}" for first, last in zip(starts, ends, strict=True)]
    return " OR ".join(ranges) if len(ranges) <= _MOST_RANGES else f"seq BETWEEN {seqs[0]} AND {seqs[-1]}"

"""One batch into DuckDB: in one transaction with how far the journal is loaded, and without what is stored already."""

import contextlib

import duckdb
import pyarrow as pa

from trainspan_collector.batch import Tables
from trainspan_collector.segments import Progress

__all__ = ["load"]

_SAME_SPANS = """
SELECT i.seq, i.richness, s.seq, s.richness FROM incoming i
JOIN stored.spans s ON s.span_key = i.span_key AND s.trace_id = i.trace_id
ANTI JOIN stored.superseded d ON d.seq = s.seq
"""
_SAME_LOGS = "SELECT i.seq, false, s.seq, false FROM incoming i JOIN stored.logs s ON s.content_hash = i.content_hash"
_SAME_EVALUATIONS = """
SELECT i.seq, (NOT i.untrusted, i.on_span), s.seq, (NOT s.untrusted, s.on_span) FROM incoming i
JOIN stored.evaluations s ON s.key = i.key
ANTI JOIN stored.superseded d ON d.seq = s.seq
"""


def load(cursor: duckdb.DuckDBPyConnection, rows: Tables, progress: Progress) -> int:
    """Commits `rows` and `progress`; the number of rows that were in the batch or in the store already.

    Raises duckdb.Error; the caller then rolls back.
    """
    cursor.execute("BEGIN")
    n_duplicates = rows.n_duplicates
    for table, incoming, same in (
        ("stored.spans", rows.spans, _SAME_SPANS),
        ("stored.logs", rows.logs, _SAME_LOGS),
        ("stored.evaluations", rows.evaluations, _SAME_EVALUATIONS),
    ):
        if incoming is not None:
            n_duplicates += _insert(cursor, table, incoming, same)
    cursor.execute(
        "UPDATE stored.progress SET segment = ?, byte_offset = ?, last_seq = ?",
        [progress.position.segment, progress.position.offset, progress.last_seq],
    )
    cursor.execute("COMMIT")
    return n_duplicates


def _insert(cursor: duckdb.DuckDBPyConnection, table: str, incoming: pa.Table, same: str) -> int:
    """Inserts what is new or of greater rank than what is stored; the number of duplicates met."""
    cursor.register("incoming", incoming)
    try:
        pairs = cursor.execute(same).fetchall()
        replaced = [old for _, new_rank, old, old_rank in pairs if new_rank > old_rank]
        dropped = [new for new, new_rank, _, old_rank in pairs if new_rank <= old_rank]
        if replaced:
            cursor.execute("INSERT INTO stored.superseded SELECT unnest(?)", [replaced])
        cursor.execute(f"INSERT INTO {table} BY NAME SELECT * FROM incoming WHERE NOT list_contains(?, seq)", [dropped])
    finally:
        with contextlib.suppress(duckdb.TransactionException):  # the transaction has failed; the next one replaces it
            cursor.unregister("incoming")
    return len(pairs)

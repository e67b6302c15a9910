"""One batch into DuckDB: in one transaction with how far the journal is loaded, and without what is stored already."""

import contextlib

import duckdb
import pyarrow as pa

from trainspan_collector.batch import Batch
from trainspan_collector.database import Progress
from trainspan_collector.rows import evaluation_table, log_table, span_table

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


def load(cursor: duckdb.DuckDBPyConnection, batch: Batch, progress: Progress) -> int:
    """Commits `batch` and `progress`; the number of rows that were in the batch or in the store already.

    Raises duckdb.Error, and what Arrow raises; the caller then rolls back.
    """
    cursor.execute("BEGIN")
    n_duplicates = batch.n_duplicates
    if batch.spans:
        n_duplicates += _insert(cursor, "stored.spans", span_table(batch.spans), _SAME_SPANS)
    if batch.logs:
        n_duplicates += _insert(cursor, "stored.logs", log_table(batch.logs), _SAME_LOGS)
    if batch.evaluations:
        n_duplicates += _insert(cursor, "stored.evaluations", evaluation_table(batch.evaluations), _SAME_EVALUATIONS)
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

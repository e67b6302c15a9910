"""Read-only transactions: a consistent picture of the store, while loading goes on, and its watermark."""

import contextlib
import threading
from collections.abc import Iterator, Mapping

import duckdb
import pyarrow as pa

from trainspan_collector.database import Database
from trainspan_collector.failures import first_line
from trainspan_schemas.errors import StoreError, UsageError

__all__ = ["Snapshot", "UserQueries"]

_ROWS_PER_BATCH = 2048


class Snapshot:
    """One read-only transaction on a cursor of its own; to be closed. `watermark` is the last `seq` it can see."""

    def __init__(self, database: Database) -> None:
        self._cursor = database.cursor()
        try:
            self._cursor.execute("BEGIN TRANSACTION READ ONLY")
            [(last_seq,)] = self._cursor.execute("SELECT last_seq FROM stored.progress").fetchall()
        except duckdb.Error as error:
            self._cursor.close()
            raise StoreError(f"cannot read the store: {first_line(error)}") from error
        self.watermark: int = last_seq

    def query(self, sql: str, parameters: Mapping[str, object]) -> pa.RecordBatchReader:
        """Streams the rows; nothing is held in memory but the next few batches."""
        return self._cursor.sql(sql, params=dict(parameters)).to_arrow_reader(_ROWS_PER_BATCH)

    def user_query(self, sql: str) -> pa.RecordBatchReader:
        """The same for text that a user wrote: exactly one SELECT. Raises UsageError for anything else."""
        try:
            statements = self._cursor.extract_statements(sql)
        except duckdb.Error as error:
            raise UsageError(first_line(error)) from error
        kinds = [statement.type for statement in statements]
        if kinds != [duckdb.StatementType.SELECT]:
            found = ", ".join(kind.name for kind in kinds) or "nothing"
            raise UsageError(f"the store is read with exactly one SELECT statement; this is {found}")
        return self._cursor.sql(sql).to_arrow_reader(_ROWS_PER_BATCH)

    def interrupt(self) -> None:
        """Ends the query that runs, from another thread."""
        self._cursor.interrupt()

    def close(self) -> None:
        with contextlib.suppress(duckdb.Error):
            self._cursor.execute("ROLLBACK")
        self._cursor.close()


class UserQueries:
    """The user queries that run now: ended after `limit_s`, or together when the loader needs their memory."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._running: set[Snapshot] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def limited(self, snapshot: Snapshot) -> Iterator[None]:
        timer = threading.Timer(self._limit_s, snapshot.interrupt)
        timer.daemon = True
        with self._lock:
            self._running.add(snapshot)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._running.discard(snapshot)

    def cancel_all(self) -> None:
        with self._lock:
            for snapshot in self._running:
                snapshot.interrupt()

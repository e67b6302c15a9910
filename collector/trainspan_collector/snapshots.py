"""Read-only transactions: a consistent picture of the store, while loading goes on, and its watermark."""

import contextlib
import threading
from collections.abc import Iterator, Mapping

import duckdb
import pyarrow as pa

from trainspan_collector.database import Database
from trainspan_collector.failures import first_line
from trainspan_schemas.errors import StoreError, UsageError

__all__ = ["Readers", "Snapshot"]

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

    @property
    def cursor(self) -> duckdb.DuckDBPyConnection:
        """For statements of our own."""
        return self._cursor

    def interrupt(self) -> None:
        """Ends the query that runs, from another thread."""
        self._cursor.interrupt()

    def close(self) -> None:
        with contextlib.suppress(duckdb.Error):
            self._cursor.execute("ROLLBACK")
        self._cursor.close()


class Readers:
    """The snapshots that are open. User queries end after `limit_s`, or together when the loader needs their memory."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._open: set[Snapshot] = set()
        self._of_users: set[Snapshot] = set()
        self._changed = threading.Condition()
        self._is_shut = False

    @contextlib.contextmanager
    def snapshot(self, database: Database) -> Iterator[Snapshot]:
        """A snapshot for the time of the block; it begins when nobody is `alone`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_shut)
            snapshot = Snapshot(database)
            self._open.add(snapshot)
        try:
            yield snapshot
        finally:
            snapshot.close()
            with self._changed:
                self._open.discard(snapshot)
                self._changed.notify_all()

    @contextlib.contextmanager
    def limited(self, snapshot: Snapshot) -> Iterator[None]:
        """Marks it as a user's query, for the time of the block."""
        timer = threading.Timer(self._limit_s, snapshot.interrupt)
        timer.daemon = True
        with self._changed:
            self._of_users.add(snapshot)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._changed:
                self._of_users.discard(snapshot)

    def cancel_user_queries(self) -> None:
        with self._changed:
            for snapshot in self._of_users:
                snapshot.interrupt()

    @contextlib.contextmanager
    def alone(self, grace_s: float, timeout_s: float) -> Iterator[None]:
        """Lets new readers wait, gives those that read `grace_s` to finish, then ends them.

        Raises StoreError where a reader neither finishes nor can be ended within `timeout_s`: one that takes no rows.
        """
        with self._changed:
            self._is_shut = True
            try:
                if not self._changed.wait_for(lambda: not self._open, grace_s):
                    for snapshot in self._open:
                        snapshot.interrupt()
                    if not self._changed.wait_for(lambda: not self._open, timeout_s):
                        raise StoreError(
                            f"{len(self._open)} readers hold the store and take no rows: end them, then try again"
                        )
                yield
            finally:
                self._is_shut = False
                self._changed.notify_all()

"""Readers of the store: read-only transactions for named reads, and separate processes for users' queries."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import duckdb
import pyarrow as pa

from trainspan_collector.store.database import Database
from trainspan_collector.store.duckdb_errors import first_line
from trainspan_collector.store.row_groups import largest_row_bytes, rows_at_once
from trainspan_collector.store.sql_process import SqlLimits, SqlProcess, SqlServer
from trainspan_schemas.errors import StoreError

__all__ = ["Readers", "Snapshot"]

_END_AGAIN_S = 0.5
_MOST_QUERIES = 4


class _Reader(Protocol):
    def end(self) -> None:
        """Ends it soon, from another thread; it may have ended already."""


class Snapshot:
    """One read-only transaction on its own cursor; must be closed. `watermark` is the last `seq` it can see."""

    def __init__(self, database: Database, on_end: Callable[[], object] = lambda: None) -> None:
        """`on_end` is called if the reader is ended: it releases rows that nobody takes."""
        self._on_end = on_end
        self._cursor = database.cursor()
        try:
            self._cursor.execute("BEGIN TRANSACTION READ ONLY")
            [(last_seq,)] = self._cursor.execute("SELECT last_seq FROM stored.progress").fetchall()
            self._rows_at_once = rows_at_once(largest_row_bytes(self._cursor))
        except duckdb.Error as error:
            self._cursor.close()
            raise StoreError(f"cannot read the store: {first_line(error)}") from error
        self.watermark: int = last_seq

    def query(self, sql: str, parameters: Mapping[str, object]) -> pa.RecordBatchReader:
        """Streams the rows; nothing is held in memory but the next few batches."""
        return self._cursor.sql(sql, params=dict(parameters)).to_arrow_reader(self._rows_at_once)

    @property
    def cursor(self) -> duckdb.DuckDBPyConnection:
        """For the collector's own statements."""
        return self._cursor

    def end(self) -> None:
        self._cursor.interrupt()
        self._on_end()

    def close(self) -> None:
        with contextlib.suppress(duckdb.Error):
            self._cursor.execute("ROLLBACK")
        self._cursor.close()


class Readers:
    """The active readers. Thread-safe."""

    def __init__(self, limits: SqlLimits) -> None:
        """`limits` apply to each user's query."""
        self._limits = limits
        self._server = SqlServer()
        self._open: set[_Reader] = set()
        self._queries: dict[SqlProcess, Callable[[], object]] = {}
        self._query_places = threading.BoundedSemaphore(_MOST_QUERIES)
        self._changed = threading.Condition()
        self._is_shut = False
        self._is_closed = False

    @contextlib.contextmanager
    def snapshot(self, database: Database, on_end: Callable[[], object] = lambda: None) -> Iterator[Snapshot]:
        """A snapshot for the block; it begins when nobody is `alone`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_shut or self._is_closed)
            self._check_open()
            snapshot = Snapshot(database, on_end)
            self._open.add(snapshot)
        try:
            yield snapshot
        finally:
            snapshot.close()
            self._leave(snapshot)

    @contextlib.contextmanager
    def query(
        self, database: Database, sql: str, behind: str, on_end: Callable[[], object] = lambda: None
    ) -> Iterator[SqlProcess]:
        """A process that runs a user's query on the store as it is now. Raises StoreError if too many run.

        `on_end` is called if its reader does not notice that it was ended.
        """
        if not self._query_places.acquire(timeout=self._limits.seconds):
            raise StoreError(f"{_MOST_QUERIES} queries are running: try again when one of them has ended")
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_shut or self._is_closed)
                self._check_open()  # before opening the file, which a closed database cannot
            with database.frozen() as frozen, self._changed:
                self._check_open()
                metadata = {"watermark": str(frozen.last_seq), "behind": behind}
                query = SqlProcess(self._server, sql, frozen, metadata, self._limits)
                self._open.add(query)
                self._queries[query] = on_end
            try:
                yield query
            finally:
                query.close()
                self._leave(query)
        finally:
            self._query_places.release()

    def close(self) -> None:
        self._server.close()

    def admit_checkpoint(self, by_force: bool) -> bool:
        """Whether no user's query reads the file; with `by_force`, those that do are ended.

        Call while nobody can freeze the database.
        """
        with self._changed:
            queries = list(self._queries)
        if queries and not by_force:
            return False
        for query in queries:
            query.end("the store had to be written to disk: run it again, or select less")
        return all(query.has_ended_within(_END_AGAIN_S) for query in queries)

    def end(self, grace_s: float, timeout_s: float) -> None:
        """Admits no more readers, gives active ones `grace_s` to finish, then ends them, and waits `timeout_s` for that."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if not self._end_all(grace_s, timeout_s):
                raise StoreError(f"{len(self._open)} readers did not end")

    @contextlib.contextmanager
    def alone(self, grace_s: float, timeout_s: float) -> Iterator[None]:
        """Makes new readers wait, gives active ones `grace_s` to finish, then ends them.

        Raises StoreError if one cannot be ended within `timeout_s`.
        """
        with self._changed:
            self._is_shut = True
            try:
                if not self._end_all(grace_s, timeout_s):
                    raise StoreError(f"{len(self._open)} readers hold the store: end them, then try again")
                yield
            finally:
                self._is_shut = False
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError("the collector is closing the store: try again")

    def _leave(self, reader: Snapshot | SqlProcess) -> None:
        with self._changed:
            self._open.discard(reader)
            if isinstance(reader, SqlProcess):
                self._queries.pop(reader, None)
            self._changed.notify_all()

    def _end_all(self, grace_s: float, timeout_s: float) -> bool:
        """Whether all have left. A reader may begin another statement just after it was ended, so it is ended repeatedly."""
        if self._changed.wait_for(lambda: not self._open, grace_s):
            return True
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for reader in self._open:
                reader.end()
            if self._changed.wait_for(lambda: not self._open, _END_AGAIN_S):
                return True
            for let_go in list(self._queries.values()):
                let_go()
        return False

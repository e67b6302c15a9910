"""Makes batches durable, each in one transaction with the journal position, and makes checkpoints.

After a crash, the store holds both or neither. Journal segments are deleted only after a checkpoint that covers them: until
then, they can rebuild what a damaged write-ahead log held.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import duckdb
import pyarrow as pa

from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import LoadProgress
from trainspan_collector.rows.batch import Tables
from trainspan_collector.rows.tally import LoadCounting
from trainspan_collector.runtime.metrics import LoadCounts
from trainspan_collector.store.database import Database
from trainspan_collector.store.duckdb_errors import ReopenError, first_line, is_invalidated, lacks_memory
from trainspan_collector.store.insert import load
from trainspan_collector.store.key_index import KeyIndex, KeyIndexError

__all__ = ["RETRY_S", "Chore", "Committer", "NotStorableError"]

log = logging.getLogger(__name__)

RETRY_S = 0.5
_MEMORY_ATTEMPTS = 3
_CHECKPOINT_WAL_BYTES = 96 * 1024 * 1024  # DuckDB holds its long texts in memory
_MAY_PASS = (duckdb.OutOfMemoryException, duckdb.IOException, duckdb.TransactionException, KeyIndexError)
"""Errors when memory or disk is full; a TransactionException is raised at COMMIT."""
_NOT_STORABLE = (duckdb.DataError, duckdb.IntegrityError, duckdb.InvalidInputException, pa.ArrowInvalid)
"""Errors for rows that DuckDB or Arrow refuses."""


class NotStorableError(Exception):
    """DuckDB refused the rows, for the reason `error`; nothing of the batch is stored."""

    def __init__(self, error: Exception) -> None:
        super().__init__(first_line(error))
        self.error = error


class Chore(Protocol):
    """Work on the store that is due from time to time, between two batches."""

    def is_due(self) -> bool: ...

    def apply(self, cursor: duckdb.DuckDBPyConnection) -> object:
        """Runs it in one transaction. Raises duckdb.Error or OSError."""
        ...


class Committer:
    """Used by the loader's thread; other threads may read `progress`, and wait for `advanced`."""

    def __init__(
        self,
        database: Database,
        journal: Journal,
        index: KeyIndex,
        *,
        checkpoint_bytes: int,
        admit_checkpoint: Callable[[bool], bool],
        on_loaded: Callable[[LoadCounts], None],
    ) -> None:
        """`admit_checkpoint` says whether a checkpoint may run; True forces it, see `Readers`. `on_loaded` is called after each batch."""
        self._database = database
        self._journal = journal
        self._index = index
        self._checkpoint_bytes = checkpoint_bytes
        self._admit_checkpoint = admit_checkpoint
        self._counting = LoadCounting(on_loaded)
        self._cursor = database.cursor()
        self._row_groups = database.row_groups()
        self.progress = database.progress()
        """Everything before it is loaded."""
        self.advanced = threading.Condition()
        self.stopping = threading.Event()
        """Once it is set, nothing is retried."""
        self._checkpointed = self.progress.position
        self.n_duplicates = 0
        self.n_retries = 0

    def reconnect(self) -> None:
        """Takes a new cursor: the database's file may have been replaced."""
        self._cursor = self._database.cursor()
        self._row_groups.forget()

    def cover_keys(self) -> None:
        """Completes the key index. Raises KeyIndexError."""
        self._index.cover(self._cursor)

    def commit(self, rows: Tables, progress: LoadProgress) -> None:
        """Stores a batch that ends at `progress`, as soon as there is memory and disk space for it.

        Raises NotStorableError if DuckDB refuses the rows, and ReopenError if the database must be reopened, with more
        memory if that is short. Anything else is a bug and is raised.
        """
        try:
            self._commit_with_retries(rows, progress)
        except _NOT_STORABLE as error:
            self._roll_back()
            raise NotStorableError(error) from error
        with self.advanced:
            self.progress = progress
            self.advanced.notify_all()

    def apply(self, chore: Chore) -> None:
        """Runs a chore, or postpones it if memory or disk is short."""
        try:
            self.cover_keys()
            with self._database.writing:
                chore.apply(self._cursor)
        except _MAY_PASS as error:
            self._roll_back()
            log.warning("%s put off error=%r", type(chore).__name__, first_line(error))

    def checkpoint_if_due(self) -> None:
        """Checkpoints if the write-ahead log or the loaded part of the journal is large."""
        loaded_bytes = self._journal.bytes_before(self.progress.position)
        if self._database.wal_bytes() >= _CHECKPOINT_WAL_BYTES or loaded_bytes >= self._checkpoint_bytes:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Moves the write-ahead log into the file and deletes the journal up to there; postpones it if that is impossible now."""
        position = self.progress.position
        if position == self._checkpointed and not self._database.wal_bytes():
            return
        started = time.monotonic()
        if not self._database.has_room_to_checkpoint():
            log.warning("checkpoint put off: the disk lacks room for it wal_bytes=%d", self._database.wal_bytes())
            return
        try:
            with self._database.writing:
                if not self._admit_checkpoint(self._is_overdue()):
                    log.info("checkpoint put off: users' queries read the file")
                    return
                self._database.checkpoint()
        except _MAY_PASS as error:
            if is_invalidated(error):
                raise ReopenError.because(error) from error
            log.warning("checkpoint put off error=%r", first_line(error))
            return
        self._checkpointed = position
        self._journal.release(position)
        log.info("checkpoint seconds=%.3f last_seq=%d", time.monotonic() - started, self.progress.last_seq)

    def _commit_with_retries(self, rows: Tables, progress: LoadProgress) -> None:
        attempt = 0
        while True:
            attempt += 1
            try:
                self._commit(rows, progress)
            except _MAY_PASS as error:
                self._roll_back()
                log.warning("load failed spans=%d attempt=%d error=%r", rows.n_spans, attempt, first_line(error))
                if is_invalidated(error) or (lacks_memory(error) and attempt >= _MEMORY_ATTEMPTS):
                    raise ReopenError.because(error) from error
                if self.stopping.is_set():
                    raise
            else:
                return
            self.n_retries += 1
            self.stopping.wait(RETRY_S)

    def _commit(self, rows: Tables, progress: LoadProgress) -> None:
        self.cover_keys()
        with self._database.writing:
            loaded = load(self._cursor, self._index, self._row_groups, rows, progress)
        self.n_duplicates += loaded.n_duplicates
        self._counting.stored(rows.tally, loaded.n_duplicates, loaded.n_collisions)
        if loaded.n_duplicates:
            log.info("duplicates in_batch_and_stored=%d total=%d", loaded.n_duplicates, self.n_duplicates)

    def _roll_back(self) -> None:
        with contextlib.suppress(duckdb.Error):  # nothing to roll back if COMMIT itself failed
            self._cursor.execute("ROLLBACK")
        self._row_groups.forget()

    def _is_overdue(self) -> bool:
        """Whether users' queries must make way for a checkpoint."""
        if self.stopping.is_set() or self._database.wal_bytes() >= 2 * _CHECKPOINT_WAL_BYTES:
            return True
        return self._journal.bytes_before(self.progress.position) >= 2 * self._checkpoint_bytes

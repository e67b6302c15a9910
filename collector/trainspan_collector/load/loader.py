"""The loader: one thread that moves the journal into DuckDB, batch by batch, and checkpoints.

Each batch is one transaction together with the journal position, so a crash leaves both or neither. Journal segments are
deleted only after a checkpoint that covers them: until then they can rebuild what a damaged write-ahead log held.
"""

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import duckdb

from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import Position, Progress
from trainspan_collector.load.batcher import Batcher
from trainspan_collector.load.batcher_process import BatcherProcess, BatcherProcessError
from trainspan_collector.rows.batch import Batch, Tables
from trainspan_collector.rows.tally import LoadCounting
from trainspan_collector.runtime.metrics import LoadCounts
from trainspan_collector.runtime.threads import show_name
from trainspan_collector.store.database import Database
from trainspan_collector.store.duckdb_errors import ReopenError, first_line, is_invalidated, lacks_memory, may_pass
from trainspan_collector.store.insert import load
from trainspan_collector.store.key_index import KeyIndex, KeyIndexError
from trainspan_schemas.errors import StoreError

__all__ = ["Chore", "Loader"]

log = logging.getLogger(__name__)

_CHECKPOINT_IDLE_S = 30.0
_RETRY_S = 0.5
_MEMORY_ATTEMPTS = 3
_CHECKPOINT_WAL_BYTES = 96 * 1024 * 1024  # DuckDB holds long texts among these in memory
_GATHER_BYTES = 1024 * 1024
_MAY_PASS = (duckdb.OutOfMemoryException, duckdb.IOException, duckdb.TransactionException, KeyIndexError)
"""What a full memory or disk raises; a TransactionException comes at COMMIT."""
_NOT_STORABLE = (duckdb.DataError, duckdb.IntegrityError, duckdb.InvalidInputException)
"""What rows raise that DuckDB does not take."""


class _Job:
    """Work for the loader's thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: Exception | None = None

    def finish(self, error: Exception | None) -> None:
        self.error = error
        self.done.set()


class Chore(Protocol):
    """Work on the store that comes due now and then, between two batches."""

    def is_due(self) -> bool: ...

    def apply(self, cursor: duckdb.DuckDBPyConnection) -> object:
        """Does it in one transaction. Raises duckdb.Error or OSError."""
        ...


class Loader:
    """Starts with `start`, ends with `stop`; `wait_for` is a reader's barrier."""

    def __init__(
        self,
        database: Database,
        journal: Journal,
        quarantine: Quarantine,
        index: KeyIndex,
        *,
        interval_s: float,
        max_bytes: int,
        checkpoint_bytes: int,
        make_way: Callable[[bool], bool],
        on_loaded: Callable[[LoadCounts], None],
        on_failure: Callable[[], None],
        retention: Chore | None = None,
    ) -> None:
        """`make_way` says whether a checkpoint may be made; with True it must, see `Readers`. `on_loaded` is called after each batch.

        `on_failure` is called when loading cannot go on.
        """
        self._database = database
        self._journal = journal
        self._interval_s = interval_s
        self._checkpoint_bytes = checkpoint_bytes
        self._make_way = make_way
        self._counting = LoadCounting(on_loaded)
        self._on_failure = on_failure
        self._cursor = database.cursor()
        self._progress = database.progress()
        self._quarantine = quarantine
        self.index = index
        self._max_bytes = max_bytes
        self._batcher: Batcher | BatcherProcess = self._gathering_here(self._progress)
        self._may_start_process = True
        self._loaded = threading.Condition()
        self._n_waiting = 0
        self._retention = retention
        self._jobs: deque[_Job] = deque()
        self._stopping = threading.Event()
        self._checkpointed = self._progress.position
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self.failure: Exception | None = None
        self.n_duplicates = 0
        self.n_put_off = 0
        """Times that loading was put off for want of files, memory or disk."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Loads what the journal holds, checkpoints and ends. Appends must have stopped."""
        self._stopping.set()
        self._journal.nudge()
        self._thread.join()

    @property
    def position(self) -> Position:
        """Everything before it is loaded."""
        return self._progress.position

    @property
    def batcher_peak_bytes(self) -> int:
        """The most memory that the process which makes rows had; 0 where there is none."""
        batcher = self._batcher
        return batcher.peak_bytes if isinstance(batcher, BatcherProcess) else 0

    def wait_for(self, position: Position, timeout_s: float) -> bool:
        """Waits until everything before `position` is loaded; False where the time was over first."""
        with self._loaded:
            if self._progress.position >= position:
                return True
            self._n_waiting += 1
        try:
            self._journal.nudge()
            with self._loaded:
                self._loaded.wait_for(lambda: self._progress.position >= position or self.failure, timeout_s)
                return self._progress.position >= position
        finally:
            with self._loaded:
                self._n_waiting -= 1

    def cover_keys(self) -> None:
        """Makes the index of keys complete, as the next load would. Raises KeyIndexError."""
        self.between_loads(lambda: self.index.cover(self._cursor))

    def between_loads(self, work: Callable[[], None]) -> None:
        """Runs `work` in the loader's thread while nothing is loaded, and waits for it. Raises what it raises.

        The work may replace the database's file by one that is loaded as far.
        """
        job = _Job(work)
        with self._loaded:
            if self.failure is not None or self._stopping.is_set():
                raise StoreError("the collector is stopping")
            self._jobs.append(job)
        self._journal.nudge()
        job.done.wait()
        if job.error is not None:
            raise job.error

    def _run(self) -> None:
        show_name(self._thread.name)
        try:
            self._load_until_stopped()
            self._checkpoint()
        except Exception as error:
            if not isinstance(error, ReopenError):
                log.exception("loader failed")
            self.failure = error
            with self._loaded:
                self._loaded.notify_all()
            self._on_failure()
        finally:
            self._gather_here()
            self._stopping.set()
            with self._loaded:
                for job in self._jobs:
                    job.finish(StoreError("the collector is stopping"))

    def _load_until_stopped(self) -> None:
        idle_since = time.monotonic()
        due: float | None = None
        while True:
            stopping = self._stopping.is_set()
            self._do_jobs()
            self._expire()
            if not self._journal.wait_for_bytes(self._progress.position, 1, 0 if stopping else _CHECKPOINT_IDLE_S):
                if stopping:
                    return
                if time.monotonic() - idle_since >= _CHECKPOINT_IDLE_S:
                    self._gather_here()
                    self._checkpoint()
                continue
            try:
                self._batcher.fill()
                due = due or time.monotonic() + self._interval_s
                if self._batcher.is_full or stopping or self._n_waiting or time.monotonic() >= due:
                    self._load()
                    due, idle_since = None, time.monotonic()
                else:
                    self._journal.wait_for_bytes(self._batcher.read_to, _GATHER_BYTES, due - time.monotonic())
            except BatcherProcessError as error:
                log.error("%s: rows are made in the collector's own process from here on", error)
                self._may_start_process = False
                self._batcher = self._gathering_here(self._progress)
            except OSError as error:
                if stopping or not may_pass(error):
                    raise
                self._put_off(error)

    def _put_off(self, error: OSError) -> None:
        """Goes back to what is loaded, in a while: what was read since then is in the journal."""
        self.n_put_off += 1
        log.warning("loading put off error=%s", error)
        self._gather_here()
        self._batcher = self._gathering_here(self._progress)
        self._stopping.wait(_RETRY_S)

    def _do_jobs(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            try:
                job.work()
            except (StoreError, duckdb.Error, OSError) as error:
                job.finish(error)
            else:
                job.finish(None)
            self._cursor = self._database.cursor()

    def _expire(self) -> None:
        if self._retention is None or not self._retention.is_due():
            return
        try:
            with self._database.writing:
                self._retention.apply(self._cursor)
        except _MAY_PASS as error:
            self._roll_back()
            log.warning("retention put off error=%r", first_line(error))

    def _gathering_here(self, progress: Progress) -> Batcher:
        return Batcher(self._journal, progress, self._quarantine, max_bytes=self._max_bytes)

    def _gather_here(self) -> None:
        """Ends the process that makes rows."""
        if isinstance(self._batcher, BatcherProcess):
            self._batcher.close()
            self._batcher = self._gathering_here(self._progress)

    def _gather_elsewhere(self) -> None:
        """Goes on with what is gathered in a process of its own."""
        if isinstance(self._batcher, Batcher) and self._may_start_process and not self._stopping.is_set():
            self._batcher = BatcherProcess(
                self._journal, self._batcher.gathered, self._quarantine, max_bytes=self._max_bytes
            )

    def _load(self) -> None:
        was_full = self._batcher.is_full
        taken = self._batcher.take()
        try:
            if taken.tables is None:
                self._load_one_by_one(taken.progress.position, taken.error)
            else:
                self._commit_with_retries(taken.tables, taken.progress)
        except _NOT_STORABLE as error:
            self._roll_back()
            self._load_one_by_one(taken.progress.position, error)
        if was_full:
            self._gather_elsewhere()
        progress = self._progress
        wal_bytes, journal_bytes = self._database.wal_bytes(), self._journal.bytes_before(progress.position)
        if wal_bytes >= _CHECKPOINT_WAL_BYTES or journal_bytes >= self._checkpoint_bytes:
            self._checkpoint()

    def _load_one_by_one(self, end: Position, reason: Exception | None) -> None:
        """Loads at least one request and up to `end`, each in a transaction of its own; puts aside what cannot be stored."""
        log.error("batch cannot be stored error=%r: one request at a time", first_line(reason) if reason else "")
        self._gather_here()
        alone = Batcher(self._journal, self._progress, self._quarantine, max_bytes=1, n_rows=sys.maxsize)
        while True:
            alone.fill()
            taken = alone.take()
            progress, error = taken.progress, taken.error
            if taken.tables is not None:
                try:
                    self._commit_with_retries(taken.tables, progress)
                except _NOT_STORABLE as refused:
                    self._roll_back()
                    error = refused
            if error is not None:
                self._quarantine.put(alone.last_frame, error)
                self._commit_with_retries(Batch(progress.last_seq).tables(), progress)
            if progress.position >= end:
                break
        self._batcher = self._gathering_here(progress)

    def _commit_with_retries(self, rows: Tables, progress: Progress) -> None:
        """Memory that a query took, and a full disk, come back; what else fails is an error of ours and is raised.

        Raises ReopenError where the file must be opened anew, with more memory if that is what lacked.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                self._commit(rows, progress)
                break
            except _MAY_PASS as error:
                self._roll_back()
                log.warning("load failed spans=%d attempt=%d error=%r", rows.n_spans, attempt, first_line(error))
                if is_invalidated(error) or (lacks_memory(error) and attempt >= _MEMORY_ATTEMPTS):
                    raise ReopenError.because(error) from error
                if self._stopping.is_set():
                    raise
            self.n_put_off += 1
            self._stopping.wait(_RETRY_S)
        with self._loaded:
            self._progress = progress
            self._loaded.notify_all()

    def _commit(self, rows: Tables, progress: Progress) -> None:
        self.index.cover(self._cursor)
        with self._database.writing:
            n_duplicates = load(self._cursor, self.index, rows, progress)
        self.n_duplicates += n_duplicates
        self._counting.stored(rows.tally, n_duplicates)
        if n_duplicates:
            log.info("duplicates in_batch_and_stored=%d total=%d", n_duplicates, self.n_duplicates)

    def _roll_back(self) -> None:
        with contextlib.suppress(duckdb.Error):  # nothing to roll back where COMMIT itself failed
            self._cursor.execute("ROLLBACK")

    def _checkpoint(self) -> None:
        position = self._progress.position
        if position == self._checkpointed and not self._database.wal_bytes():
            return
        started = time.monotonic()
        if not self._database.has_room_to_checkpoint():
            log.warning("checkpoint put off: the disk lacks room for it wal_bytes=%d", self._database.wal_bytes())
            return
        try:
            with self._database.writing:
                if not self._make_way(self._is_overdue(position)):
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
        log.info("checkpoint seconds=%.3f last_seq=%d", time.monotonic() - started, self._progress.last_seq)

    def _is_overdue(self, position: Position) -> bool:
        """Whether users' queries must give way to a checkpoint."""
        if self._stopping.is_set() or self._database.wal_bytes() >= 2 * _CHECKPOINT_WAL_BYTES:
            return True
        return self._journal.bytes_before(position) >= 2 * self._checkpoint_bytes

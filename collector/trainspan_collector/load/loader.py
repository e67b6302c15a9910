"""The loader: one thread that moves the journal into DuckDB, batch by batch."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import duckdb

from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import Position
from trainspan_collector.load.batcher import Batcher
from trainspan_collector.load.batcher_process import BatcherProcess, BatcherProcessError
from trainspan_collector.load.committer import RETRY_S, Chore, Committer, NotStorableError
from trainspan_collector.load.salvage import salvage
from trainspan_collector.runtime.threads import show_name
from trainspan_collector.store.duckdb_errors import ReopenError, may_pass
from trainspan_schemas.errors import StoreError

__all__ = ["Loader"]

log = logging.getLogger(__name__)

_CHECKPOINT_IDLE_S = 30.0
_GATHER_BYTES = 1024 * 1024


class _Job:
    """Work for the loader's thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: Exception | None = None

    def finish(self, error: Exception | None) -> None:
        self.error = error
        self.done.set()


class Loader:
    """Starts with `start`, ends with `stop`; `wait_for` is a reader's barrier."""

    def __init__(
        self,
        journal: Journal,
        quarantine: Quarantine,
        committer: Committer,
        *,
        interval_s: float,
        max_bytes: int,
        on_failure: Callable[[], None],
        chores: Sequence[Chore] = (),
    ) -> None:
        """`on_failure` is called when loading cannot continue."""
        self._journal = journal
        self._quarantine = quarantine
        self._committer = committer
        self._stopping = committer.stopping
        self._interval_s = interval_s
        self._max_bytes = max_bytes
        self._on_failure = on_failure
        self._chores = chores
        self._batcher: Batcher | BatcherProcess = self._batcher_here()
        self._may_start_process = True
        self._n_waiting = 0
        self._jobs: deque[_Job] = deque()
        self._n_put_off = 0
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self.failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Loads the rest of the journal, checkpoints and ends. Appends must have stopped."""
        self._stopping.set()
        self._journal.nudge()
        self._thread.join()

    @property
    def position(self) -> Position:
        """Everything before it is loaded."""
        return self._committer.progress.position

    @property
    def n_duplicates(self) -> int:
        return self._committer.n_duplicates

    @property
    def n_put_off(self) -> int:
        """How often loading was postponed for lack of file descriptors, memory or disk."""
        return self._n_put_off + self._committer.n_retries

    @property
    def batcher_peak_bytes(self) -> int:
        """The row process's peak memory; 0 if there is none."""
        batcher = self._batcher
        return batcher.peak_bytes if isinstance(batcher, BatcherProcess) else 0

    def wait_for(self, position: Position, timeout_s: float) -> bool:
        """Waits until everything before `position` is loaded; False if the timeout expired first."""
        with self._committer.advanced:
            if self.position >= position:
                return True
            self._n_waiting += 1
        try:
            self._journal.nudge()
            with self._committer.advanced:
                self._committer.advanced.wait_for(lambda: self.position >= position or self.failure, timeout_s)
                return self.position >= position
        finally:
            with self._committer.advanced:
                self._n_waiting -= 1

    def cover_keys(self) -> None:
        """Completes the key index, as the next load would. Raises KeyIndexError."""
        self.between_loads(self._committer.cover_keys)

    def between_loads(self, work: Callable[[], None]) -> None:
        """Runs `work` in the loader's thread while nothing is loaded, and waits for it. Raises its errors.

        The work may replace the database's file with one that is loaded to the same position.
        """
        job = _Job(work)
        with self._committer.advanced:
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
            self._committer.checkpoint()
        except Exception as error:
            if not isinstance(error, ReopenError):
                log.exception("loader failed")
            self.failure = error
            with self._committer.advanced:
                self._committer.advanced.notify_all()
            self._on_failure()
        finally:
            self._end_process()
            self._stopping.set()
            with self._committer.advanced:
                for job in self._jobs:
                    job.finish(StoreError("the collector is stopping"))

    def _load_until_stopped(self) -> None:
        idle_since = time.monotonic()
        due: float | None = None
        while True:
            stopping = self._stopping.is_set()
            self._do_jobs()
            self._do_chores()
            if not self._journal.wait_for_bytes(self.position, 1, 0 if stopping else _CHECKPOINT_IDLE_S):
                if stopping:
                    return
                if time.monotonic() - idle_since >= _CHECKPOINT_IDLE_S:
                    self._end_process()
                    self._committer.checkpoint()
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
                log.error("%s: rows are made in the collector's own process from now on", error)
                self._may_start_process = False
                self._batcher = self._batcher_here()
            except OSError as error:
                if stopping or not may_pass(error):
                    raise
                self._put_off(error)

    def _put_off(self, error: OSError) -> None:
        """Goes back to what is loaded and waits a while: what was read since then is still in the journal."""
        self._n_put_off += 1
        log.warning("loading put off error=%s", error)
        self._end_process()
        self._batcher = self._batcher_here()
        self._stopping.wait(RETRY_S)

    def _do_jobs(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            try:
                job.work()
            except Exception as error:
                job.finish(error)
                if not isinstance(error, (StoreError, duckdb.Error, OSError)):
                    raise
            else:
                job.finish(None)
            self._committer.reconnect()

    def _do_chores(self) -> None:
        for chore in self._chores:
            if chore.is_due():
                self._committer.apply(chore)

    def _load(self) -> None:
        was_full = self._batcher.is_full
        taken = self._batcher.next_batch()
        if taken.tables is None:
            self._salvage(taken.progress.position, taken.error)
        else:
            try:
                self._committer.commit(taken.tables, taken.progress)
            except NotStorableError as refused:
                self._salvage(taken.progress.position, refused.error)
        if was_full:
            self._start_process()
        self._committer.checkpoint_if_due()

    def _salvage(self, end: Position, reason: Exception | None) -> None:
        self._end_process()
        salvage(self._journal, self._quarantine, self._committer, end, reason)
        self._batcher = self._batcher_here()

    def _batcher_here(self) -> Batcher:
        return Batcher(self._journal, self._committer.progress, self._quarantine, max_bytes=self._max_bytes)

    def _start_process(self) -> None:
        """Hands what is gathered to a row process."""
        if isinstance(self._batcher, Batcher) and self._may_start_process and not self._stopping.is_set():
            self._batcher = BatcherProcess(
                self._journal, self._batcher.gathered, self._quarantine, max_bytes=self._max_bytes
            )

    def _end_process(self) -> None:
        if isinstance(self._batcher, BatcherProcess):
            self._batcher.close()
            self._batcher = self._batcher_here()

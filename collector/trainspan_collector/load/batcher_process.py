"""A separate row process, for a collector under load.

Rows are made in Python. In the collector's own process, that holds the interpreter lock for two thirds of the loading time,
and every acknowledgement waits for it. Everything the row process reads is already on disk, so nothing is lost if it dies.
"""

import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TypeVar

import pyarrow as pa

from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import Position
from trainspan_collector.load.batcher import PendingBatch, ReadyBatch
from trainspan_collector.load.batcher_messages import TABLES, Begin, Fill, Filled, Head, Take
from trainspan_collector.rows.batch import Tables
from trainspan_collector.runtime.child_processes import signals_blocked
from trainspan_collector.store.duckdb_errors import may_pass

__all__ = ["BatcherProcess", "BatcherProcessError"]

_END_S = 10.0
_Message = TypeVar("_Message", Filled, Head)


class BatcherProcessError(Exception):
    """The process has ended. What it held is still in the journal."""


class BatcherProcess:
    """Like `Batcher`; its methods raise BatcherProcessError, or OSError if out of file descriptors or memory.

    It fills the next batch while the previous one is loaded.
    """

    def __init__(self, journal: Journal, gathered: PendingBatch, quarantine: Quarantine, *, max_bytes: int) -> None:
        self._journal = journal
        self._quarantine = quarantine
        ours, theirs = socket.socketpair()
        try:
            self._shared = _file_in_memory()
        except OSError:
            ours.close()
            theirs.close()
            raise
        descriptors = (theirs.fileno(), self._shared)
        try:
            with theirs, signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "trainspan_collector.load.batcher_worker", *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        except OSError as error:
            ours.close()
            os.close(self._shared)
            if may_pass(error):
                raise
            raise BatcherProcessError(f"the row process did not start: {error}") from error
        self._connection: Connection[object, object] = Connection(ours.detach())
        self._filled = Filled(is_full=False, read_to=gathered.read_to, n_quarantined=0, peak_bytes=0)
        self._is_filling = False
        self._send(Begin(journal.folder, quarantine.folder, max_bytes, gathered))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def read_to(self) -> Position:
        return self._filled.read_to

    @property
    def is_full(self) -> bool:
        return self._filled.is_full

    @property
    def peak_bytes(self) -> int:
        """The process's peak memory."""
        return self._filled.peak_bytes

    def fill(self) -> None:
        if not self._is_filling:
            self._send(Fill(self._journal.segments_from(self.read_to)))
        filled = self._receive(Filled)
        self._is_filling = False
        self._quarantine.n_requests += filled.n_quarantined - self._filled.n_quarantined
        self._filled = filled
        for name, level, text in filled.logged:
            logging.getLogger(name).log(level, "%s", text)

    def next_batch(self) -> ReadyBatch:
        """Call after `fill`. The tables are valid until the next call."""
        self._send(Take(self._journal.segments_from(self.read_to)))
        head = self._receive(Head)
        self._is_filling = True
        if head.tally is None:
            return ReadyBatch(None, head.progress, ValueError(head.error))
        tables = self._tables(head.sizes)
        return ReadyBatch(Tables(**tables, n_duplicates=head.n_duplicates, tally=head.tally), head.progress)

    def _tables(self, sizes: Mapping[str, int]) -> dict[str, pa.Table | None]:
        tables: dict[str, pa.Table | None] = dict.fromkeys(TABLES)
        if not any(sizes.values()):
            return tables
        data = pa.py_buffer(mmap.mmap(self._shared, sum(sizes.values()), access=mmap.ACCESS_READ))
        start = 0
        for name, size in sizes.items():
            tables[name] = pa.ipc.open_stream(data.slice(start, size)).read_all()
            start += size
        return tables

    def close(self) -> None:
        """Ends the process; what it holds is still in the journal."""
        if self._connection.closed:
            return
        self._connection.close()
        os.close(self._shared)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Begin | Fill | Take) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._ended() from error

    def _receive(self, kind: type[_Message]) -> _Message:
        try:
            message = self._connection.recv()
        except (OSError, EOFError) as error:
            raise self._ended() from error
        assert isinstance(message, kind)
        return message

    def _ended(self) -> BatcherProcessError:
        self.close()
        return BatcherProcessError(f"the row process ended with code {self._process.returncode}")


def _file_in_memory() -> int:
    """A descriptor of an unnamed file, in memory if the system supports that, else on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainspan-rows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

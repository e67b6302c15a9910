"""A user's query in a separate process, whose memory the system bounds.

DuckDB's limit does not count what a function builds within one vector: `SELECT len(range(150000000))` took 14 GB.
The process reads the store's file itself, as it was when the query began (see Frozen), so only the rows of its answer pass
through the collector.
"""

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainspan_collector.runtime.child_processes import signals_blocked
from trainspan_collector.store.sql_messages import END, FAILED, HEAD, REFUSED, SqlTask
from trainspan_schemas.errors import StoreError, UsageError

__all__ = ["Frozen", "SqlLimits", "SqlProcess", "SqlServer"]

_READ_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Frozen:
    """The store's file and its write-ahead log, as written at one moment.

    Until a checkpoint, DuckDB only appends to the log and writes to free blocks of the file: none may be made meanwhile.
    """

    file: int
    """Descriptor."""
    log: int | None
    log_bytes: int
    last_seq: int
    largest_row_bytes: int
    folder: Path
    """Sorts and joins that need more memory may write here."""


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """Limits of one query."""

    seconds: float
    memory_bytes: int
    """In addition to what a process has at its start, about 80 MiB."""


_QUERY_FOLDER: Final = "query-"
_LEAST_SPILL_BYTES: Final = 16 * 1024 * 1024
_SPILL_PART: Final = 16
"""The free disk divided by this is what one query may spill: four may run, and senders need the rest."""


class SqlServer:
    """Starts the processes: they are forked from one with the imports, which starts with the first query. Thread-safe."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self, task: SqlTask, descriptors: list[int]) -> None:
        """Starts a query's process. Raises OSError."""
        text = json.dumps(task).encode()
        with self._lock, tempfile.TemporaryFile() as file:  # of any length, unlike a datagram
            if self._is_closed:
                raise OSError("the collector is stopping")
            file.write(text)
            file.flush()
            if self._control is None:
                self._spawn()
            try:
                self._send([file.fileno(), *descriptors])
            except OSError:  # it has ended
                self._stop()
                self._spawn()
                self._send([file.fileno(), *descriptors])

    def close(self) -> None:
        """Running queries continue; no new ones start."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _send(self, descriptors: list[int]) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [bytes([len(descriptors)])], descriptors)

    def _spawn(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainspan_collector.store.sql_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},  # Arrow's own reserves a GiB, which counts
            )

    def _stop(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
        self._control = self._process = None


def remove_query_folders(folder: Path) -> None:
    """Deletes what queries of a killed collector spilled."""
    for left in folder.glob(f"{_QUERY_FOLDER}*"):
        shutil.rmtree(left, ignore_errors=True)


class SqlProcess:
    """A query that runs from construction on; must be closed. `answer` yields its answer."""

    def __init__(
        self, server: SqlServer, sql: str, frozen: Frozen, metadata: Mapping[str, str], limits: SqlLimits
    ) -> None:
        self._limits = limits
        self._ended_because: str | None = None
        self._folder = tempfile.mkdtemp(prefix=_QUERY_FOLDER, dir=frozen.folder)
        task: SqlTask = {
            "sql": sql,
            "metadata": dict(metadata),
            "log_bytes": frozen.log_bytes,
            "memory_bytes": limits.memory_bytes,
            "seconds": limits.seconds,
            "largest_row_bytes": frozen.largest_row_bytes,
            "folder": self._folder,
            "spill_bytes": max(_LEAST_SPILL_BYTES, shutil.disk_usage(frozen.folder).free // _SPILL_PART),
        }
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                server.start(task, [theirs.fileno(), frozen.file, *([] if frozen.log is None else [frozen.log])])
        except OSError as error:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise StoreError(f"cannot start a process for the query: {error}") from error
        self._timer = threading.Timer(limits.seconds, self.end, [f"it took more than {limits.seconds:g} s"])
        self._timer.daemon = True
        self._timer.start()

    def answer(self) -> Iterator[bytes]:
        """Each Arrow message as a FlightData, the schema first; only the next one is held.

        Raises UsageError for a query that users may not run, StoreError if it fails or was ended.
        """
        while True:
            kind, n_bytes = HEAD.unpack(self._read(HEAD.size))
            body = self._read(n_bytes)
            if kind == END:
                return
            if kind == REFUSED:
                raise UsageError(body.decode())
            if kind == FAILED:
                raise StoreError(body.decode())
            yield body

    def end(self, reason: str = "the collector needs exclusive access to the store: try again") -> None:
        """Ends it soon, from any thread; its reader gets `reason`."""
        self._ended_because = self._ended_because or reason
        with contextlib.suppress(OSError):  # closed
            self._socket.shutdown(socket.SHUT_WR)

    def has_ended_within(self, timeout_s: float) -> bool:
        """Whether the process ends in time. Call after `end`."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
        except ValueError:  # closed, so it has ended
            return True
        return bool(poll.poll(1000 * timeout_s))

    def close(self) -> None:
        """Returns once the process has ended."""
        self._timer.cancel()
        self.end()
        with contextlib.suppress(OSError):
            while self._socket.recv(_READ_BYTES):
                pass
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, n_bytes: int) -> bytes:
        """Raises StoreError if the process ended before it had written `n_bytes`."""
        data = bytearray(n_bytes)
        view = memoryview(data)
        while view:
            n_read = self._socket.recv_into(view)
            if not n_read:
                raise StoreError(
                    f"the query was ended: {self._ended_because}"
                    if self._ended_because
                    else f"the query ended its process: it may need more than the {self._limits.memory_bytes} bytes of "
                    "sql_memory_bytes in [collector]"
                )
            view = view[n_read:]
        return bytes(data)

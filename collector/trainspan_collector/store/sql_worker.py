"""Processes for users' queries: `python -m trainspan_collector.store.sql_worker FD`, started by sql_process.py, which explains why.

It imports what queries need, then forks one process for each task received over FD, and exits when FD closes. A task is three
or four descriptors: a file with JSON, a socket for the answer, the store's file, and its write-ahead log. A query opens no other
files, and takes no lock on these: DuckDB's own would prevent reading the store while the collector has it open. It ends at once
if the collector closes its side of the socket.
"""

import json
import os
import resource
import signal
import socket
import sys
import threading
from math import ceil
from typing import Any, Final, NoReturn

import duckdb
import fsspec
import pyarrow as pa

from trainspan_collector.network.flight_messages import flight_data, parts_of
from trainspan_collector.runtime.memory import bound_freed_memory
from trainspan_collector.store.duckdb_errors import first_line, lacks_memory
from trainspan_collector.store.row_groups import rows_at_once, scan_settings, threads_within
from trainspan_collector.store.sql_messages import END, FAILED, HEAD, MESSAGE, REFUSED, SqlTask

__all__ = ["main"]

_STORE: Final = "frozen://store"
_MOST_DESCRIPTORS: Final = 4
_BLOCK_BYTES: Final = 1024 * 1024
_KEPT_BYTES: Final = 32 * 1024 * 1024
_HUGE_PER_MEMORY: Final = 1024
"""If fewer than these of the largest rows fit into the process's memory, they are huge."""
_MOST_THREADS: Final = 4
"""Each one's stack counts against the memory limit: 8 MiB."""


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who end
    bound_freed_memory(_BLOCK_BYTES, _KEPT_BYTES)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 1, _MOST_DESCRIPTORS)
            if not data:
                return
            if os.fork() == 0:
                control.close()
                _run(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _run(task_file: int, answer: int, *files: int) -> NoReturn:
    with os.fdopen(task_file, "rb") as file:
        file.seek(0)
        task: SqlTask = json.loads(file.read())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, ceil(task["seconds"]) + 1)  # whatever happens to the collector
    out = socket.socket(fileno=answer)
    threading.Thread(target=_end_with, args=[out], daemon=True).start()
    _bound_memory(task["memory_bytes"])
    try:
        try:
            # It stays open until the process ends: closing a database while its threads still release blocks can crash.
            connection = _open(task, files)
            reader = _select(connection, task["sql"], rows_at_once(task["largest_row_bytes"]))
        except (duckdb.Error, ValueError, MemoryError) as error:
            _send_message(out, *_explained(error, task, REFUSED))
            os._exit(0)
        try:
            _write(out, reader, task["metadata"])
        except ConnectionError:
            raise
        except (duckdb.Error, pa.ArrowException, MemoryError, OSError) as error:  # Arrow's for DuckDB's is OSError
            _send_message(out, *_explained(error, task, FAILED))
    except OSError:  # the reader is gone
        pass
    os._exit(0)  # at once: there is nothing to clean up


def _end_with(answer: socket.socket) -> None:
    """Ends the process when the other side closes, whatever it is doing."""
    answer.recv(1)
    os._exit(0)


def _bound_memory(memory_bytes: int) -> None:
    """Limits what the process can write to; its address space is larger, as the C library reserves some for each thread."""
    with open("/proc/self/status") as status:
        [used_kib] = [int(line.split()[1]) for line in status if line.startswith("VmData:")]
    limit = 1024 * used_kib + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _open(task: SqlTask, files: tuple[int, ...]) -> duckdb.DuckDBPyConnection:
    """The store as it was, read-only, without access to anything else.

    DuckDB does not count all that rows take while it reads them, from its log too, and returns them: with rows of 4 MiB it is
    more than 200 MiB in each thread. So with huge rows its own limit is lower, and it has fewer threads.
    """
    file, *log = files
    sizes = {_STORE: (file, os.fstat(file).st_size)}
    if log:
        sizes[f"{_STORE}.wal"] = (log[0], task["log_bytes"])
    has_huge_rows = _HUGE_PER_MEMORY * task["largest_row_bytes"] > task["memory_bytes"]
    memory_bytes = task["memory_bytes"] // (8 if has_huge_rows else 2)
    n_threads = min(_MOST_THREADS, threads_within(memory_bytes))
    connection = duckdb.connect(
        config={
            "python_enable_replacements": "false",
            "autoload_known_extensions": "false",
            "memory_limit": f"{memory_bytes // 2**20}MiB",
            "temp_directory": task["folder"],
            "max_temp_directory_size": f"{task['spill_bytes'] // 2**20}MiB",
            "threads": str(n_threads),
            **scan_settings(task["largest_row_bytes"], memory_bytes, n_threads),
        }
    )
    connection.register_filesystem(_Frozen(sizes))
    connection.execute(f"ATTACH '{_STORE}' AS store (READ_ONLY)")
    connection.execute("USE store")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _select(connection: duckdb.DuckDBPyConnection, sql: str, n_rows: int) -> pa.RecordBatchReader:
    """Raises ValueError for anything but exactly one SELECT."""
    kinds = [statement.type for statement in connection.extract_statements(sql)]
    if kinds != [duckdb.StatementType.SELECT]:
        statements = ", ".join(kind.name for kind in kinds) or "nothing"
        raise ValueError(f"the store is read with exactly one SELECT statement; this is {statements}")
    return connection.sql(sql).to_arrow_reader(n_rows)


def _write(out: socket.socket, reader: pa.RecordBatchReader, metadata: dict[str, str]) -> None:
    written = _Parts()
    with pa.ipc.new_stream(written, reader.schema.with_metadata(metadata)) as stream:
        _send(out, written)
        for part in parts_of(reader):
            stream.write_batch(part.replace_schema_metadata(metadata))
            _send(out, written)
    _send(out, written)  # the schema, if there was no row
    _send_message(out, END, "")


def _send(out: socket.socket, written: "_Parts") -> None:
    """Sends the messages written since the last call."""
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(written.drain()))
    for message in messages:
        data = flight_data(message)
        out.sendall(HEAD.pack(MESSAGE, len(data)))
        out.sendall(data)


def _send_message(out: socket.socket, kind: int, line: str) -> None:
    text = line.encode()
    out.sendall(HEAD.pack(kind, len(text)) + text)


def _explained(error: Exception, task: SqlTask, otherwise: int) -> tuple[int, str]:
    """Kind and line, with the names that DuckDB proposes instead of an unknown one."""
    line = first_line(error)
    if isinstance(error, duckdb.BinderException | duckdb.CatalogException):
        line = " ".join(str(error).partition("\n\nLINE ")[0].split())
    if lacks_memory(error):
        return FAILED, f"{line}: raise sql_memory_bytes in [collector], which is {task['memory_bytes']}"
    return otherwise, line


class _Parts:
    """A file to write to, in memory."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def drain(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """It is only memory."""


class _Place:
    """The position at which reading continues."""

    position = 0


class _File:
    """Reads a descriptor up to a size.

    DuckDB's threads read blocks of the store in parallel, each after its own `seek`, but its log sequentially, from any thread:
    with `is_log`, they share the position.
    """

    def __init__(self, descriptor: int, n_bytes: int, *, is_log: bool) -> None:
        self._descriptor = descriptor
        self._n_bytes = n_bytes
        self._place: Any = _Place() if is_log else threading.local()

    def seek(self, position: int, whence: int = 0) -> int:
        base = {0: 0, 1: self.tell(), 2: self._n_bytes}[whence]
        self._place.position = base + position
        return base + position

    def tell(self) -> int:
        position: int = getattr(self._place, "position", 0)
        return position

    def read(self, n_bytes: int = -1) -> bytes:
        position = self.tell()
        left = max(0, self._n_bytes - position)
        data = os.pread(self._descriptor, left if n_bytes < 0 else min(n_bytes, left), position)
        self._place.position = position + len(data)
        return data

    def close(self) -> None:
        """The descriptor belongs to the process."""


class _Frozen(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """`frozen://store` and its write-ahead log, and no other file."""

    protocol = "frozen"
    cachable = False

    def __init__(self, files: dict[str, tuple[int, int]]) -> None:
        """`files`: name → descriptor and size."""
        super().__init__()
        self._files = files

    def exists(self, path: str, **_: Any) -> bool:
        return path in self._files

    def isdir(self, path: str) -> bool:
        return False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path not in self._files:
            raise FileNotFoundError(path)
        return {"name": path, "size": self._files[path][1], "type": "file"}

    def glob(self, path: str, maxdepth: int | None = None, **_: Any) -> list[str]:
        return [path] if path in self._files else []

    def modified(self, path: str) -> float:
        return 0.0

    def open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        if path not in self._files:
            raise FileNotFoundError(path)
        if mode != "rb":
            raise PermissionError(path)
        return _File(*self._files[path], is_log=path != _STORE)


if __name__ == "__main__":
    main()

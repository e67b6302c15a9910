"""The row process: `python -m trainspan_collector.load.batcher_worker FD FILE`, started by load/batcher_process.py.

It reads the journal's files itself. FD is one end of a socket pair: the process receives `Begin` once, then answers each `Fill`
with `Filled`, and each `Take` with `Head` and `Filled`, since it continues at once. It exits when the socket closes. FILE is a
descriptor of the file that receives the tables; they can be read there until the next `Take`.
"""

import logging
import os
import resource
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import JournalEntry, Position, Segment, read_segments
from trainspan_collector.load.batcher import Batcher
from trainspan_collector.load.batcher_messages import TABLES, Begin, Fill, Filled, Head, Take
from trainspan_collector.runtime.memory import bound_freed_memory, collect_rarely, keep_pandas_out

__all__ = ["main", "write_table"]

_BLOCK_BYTES = 8 * 1024 * 1024  # read from the journal at a time
_KEPT_BYTES = 64 * 1024 * 1024


class _Files:
    """The journal's files, up to the sizes that the collector reports as whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.segments: Mapping[int, Segment] = {}

    def read(self, position: Position, max_bytes: int) -> tuple[list[JournalEntry], Position]:
        return read_segments(self._folder, self.segments, position, max_bytes)


class _LogBuffer(logging.Handler):
    """Keeps log records until they are handed over."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, record.getMessage()))

    def drain(self) -> list[tuple[str, int, str]]:
        taken, self._records = self._records, []
        return taken


def main() -> None:
    bound_freed_memory(_BLOCK_BYTES, _KEPT_BYTES)
    keep_pandas_out()
    collect_rarely()
    logs = _LogBuffer()
    logging.basicConfig(level=logging.DEBUG, handlers=[logs])
    with Connection(int(sys.argv[1])) as connection, os.fdopen(int(sys.argv[2]), "wb", buffering=0) as shared:
        try:
            _serve(connection, shared, logs)
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the collector has ended or no longer needs this
            return


def _serve(connection: "Connection[object, object]", shared: BinaryIO, logs: _LogBuffer) -> None:
    begin = connection.recv()
    assert isinstance(begin, Begin)
    files, quarantine = _Files(begin.journal), Quarantine(begin.quarantine)
    batcher = Batcher(files, begin.gathered, quarantine, max_bytes=begin.max_bytes)
    del begin
    while True:
        request = connection.recv()
        assert isinstance(request, (Fill, Take))
        if isinstance(request, Take):
            _hand_over(connection, shared, batcher)
        files.segments = request.segments
        batcher.fill()
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send(Filled(batcher.is_full, batcher.read_to, quarantine.n_requests, peak_bytes, logs.drain()))


def _hand_over(connection: "Connection[object, object]", shared: BinaryIO, batcher: Batcher) -> None:
    ready = batcher.next_batch()
    if ready.tables is None:
        connection.send(Head(ready.progress, {}, 0, None, repr(ready.error)))
        return
    shared.seek(0)
    sizes = {name: write_table(shared, table) for name in TABLES if (table := getattr(ready.tables, name)) is not None}
    shared.truncate()
    connection.send(Head(ready.progress, sizes, ready.tables.n_duplicates, ready.tables.tally, None))


def write_table(file: BinaryIO, table: pa.Table) -> int:
    """Appends `table` as an Arrow stream; returns the bytes written."""
    start = file.tell()
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return file.tell() - start


if __name__ == "__main__":
    main()

"""The DuckDB file: opened without access to other files, tables created or checked, checkpoints."""

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb

from trainspan_collector.journal.segments import LoadProgress, Position
from trainspan_collector.rows.tables import ROW_GROUP_ROWS
from trainspan_collector.runtime.threads import named
from trainspan_collector.store.duckdb_errors import ReopenError, first_line, is_locked, lacks_memory
from trainspan_collector.store.row_groups import RowGroups, largest_row_bytes, set_scans, threads_within
from trainspan_collector.store.schema import prepare
from trainspan_collector.store.sql_process import Frozen
from trainspan_schemas.errors import StoreError, StoreLockedError
from trainspan_schemas.files.durable import sync

__all__ = ["Database"]

log = logging.getLogger(__name__)

_CHECKPOINT_MARGIN_BYTES = 4 * 1024 * 1024
_WAL_LIMIT = "1TB"  # the collector makes the checkpoints: the journal is released after them


class Database:
    """The store's file, open for writing. Each thread takes its own cursor.

    Raises StoreLockedError if another process has it open, ReopenError if it needs more memory, StoreError if it is not a
    store of this version.
    """

    def __init__(self, path: Path, *, memory_bytes: int) -> None:
        self._path = path
        self._memory_bytes = memory_bytes
        self.writing = threading.Lock()
        """Held while committing, checkpointing or replacing the file."""
        try:
            self._connection = _connect(path, memory_bytes)
        except duckdb.Error as error:
            if lacks_memory(error):
                raise ReopenError.because(error) from error
            if not _is_damaged_wal(error, _wal(path)):
                raise _open_error(path, error) from error
            _set_aside(_wal(path), error)
            self._connection = _connect(path, memory_bytes)
        path.chmod(0o600)
        self._file: int | None = self._open_file()
        try:
            prepare(self.cursor(), str(path))
            set_scans(self.cursor(), self._memory_bytes)
        except (StoreError, duckdb.Error) as error:
            self.close()
            if isinstance(error, StoreError):
                raise
            raise (ReopenError.because(error) if lacks_memory(error) else _open_error(path, error)) from error

    def cursor(self) -> duckdb.DuckDBPyConnection:
        cursor = self._connection.cursor()
        cursor.execute("USE store")
        return cursor

    def row_groups(self) -> RowGroups:
        """Row groups for inserts, within the memory limit."""
        return RowGroups(self._memory_bytes)

    def progress(self) -> LoadProgress:
        [row] = self.cursor().execute("SELECT segment, byte_offset, last_seq FROM stored.progress").fetchall()
        return LoadProgress(Position(row[0], row[1]), row[2])

    def wal_bytes(self) -> int:
        """Size of the write-ahead log: what was committed since the last checkpoint."""
        try:
            return _wal(self._path).stat().st_size
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Frozen]:
        """The file and its log as they are now; nothing is committed during the block."""
        folder = Path(f"{self._path}.tmp")
        folder.mkdir(mode=0o700, exist_ok=True)
        with self.writing, contextlib.ExitStack() as opened:
            log = None
            if log_bytes := self.wal_bytes():
                log = os.open(_wal(self._path), os.O_RDONLY)
                opened.callback(os.close, log)
            if self._file is None:
                raise StoreError("the store is being closed: try again")
            last_seq, largest_bytes = self.progress().last_seq, largest_row_bytes(self.cursor())
            yield Frozen(self._file, log, log_bytes, last_seq, largest_bytes, folder)

    def has_room_to_checkpoint(self) -> bool:
        """Whether the disk has room for it: a checkpoint that fails halfway leaves a database that must be reopened."""
        return shutil.disk_usage(self._path.parent).free >= self.wal_bytes() + _CHECKPOINT_MARGIN_BYTES

    def checkpoint(self) -> None:
        """Moves everything committed into the file itself."""
        self.cursor().execute("CHECKPOINT")

    def replace_with(self, other: Path) -> None:
        """Replaces this store's file with the closed store at `other`. All existing cursors are closed.

        A crash at any moment leaves one of the two files in place, complete up to its progress.
        """
        self.close()
        _wal(self._path).unlink(missing_ok=True)
        other.replace(self._path)
        sync(self._path.parent)
        self._connection = _connect(self._path, self._memory_bytes)
        self._file = self._open_file()
        set_scans(self.cursor(), self._memory_bytes)

    def close(self) -> None:
        with contextlib.suppress(duckdb.Error):  # a database that a failed checkpoint left unusable raises again
            self._connection.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_file(self) -> int:
        """A descriptor for others to read through. It stays open: closing any descriptor releases DuckDB's lock on the file."""
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)


def _wal(path: Path) -> Path:
    return path.with_name(path.name + ".wal")


def _connect(path: Path, memory_bytes: int) -> duckdb.DuckDBPyConnection:
    """A connection that reaches no other file. Users' queries do not run on it."""
    with named("duckdb"):  # its threads
        connection = duckdb.connect(
            config={
                "python_enable_replacements": "false",
                "autoload_known_extensions": "false",
                "memory_limit": f"{memory_bytes // 2**20}MiB",
                "threads": str(threads_within(memory_bytes)),
                "temp_directory": f"{path}.tmp",
                "wal_autocheckpoint": _WAL_LIMIT,
            }
        )
    quoted = str(path).replace("'", "''")
    try:
        connection.execute(f"ATTACH '{quoted}' AS store (TYPE duckdb, ROW_GROUP_SIZE {ROW_GROUP_ROWS})")
        connection.execute("SET enable_external_access = false")
    except duckdb.Error:
        connection.close()
        raise
    return connection


def _open_error(path: Path, error: duckdb.Error) -> StoreError:
    if is_locked(error):
        holder = re.search(r"held in (.+?) \(PID (\d+)\)", str(error))
        by = f"process {holder[2]} ({holder[1]})" if holder else "another process"
        return StoreLockedError(
            f"{path} is open in {by}: stop it first; DuckDB allows only one process to write a file"
        )
    return StoreError(
        f"cannot open {path}: {first_line(error)}; put back a copy of it, or move it away to begin an empty store"
    )


def _is_damaged_wal(error: duckdb.Error, wal: Path) -> bool:
    return wal.exists() and "while replaying WAL" in str(error)


def _set_aside(wal: Path, error: duckdb.Error) -> None:
    """Renames the log. The journal still holds everything in it, so the loader can load that again."""
    renamed = wal.with_name(f"{wal.name}.damaged-{time.time_ns()}")
    wal.rename(renamed)
    log.error("write-ahead log damaged kept_as=%s error=%r: loading again from the journal", renamed, str(error))

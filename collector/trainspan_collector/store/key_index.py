"""Index from keys to the store's rows: a RocksDB database next to the store, so that the cost of finding duplicates does not depend
on how many rows are stored.

It is a cache. It knows up to which `seq` it has every row, and adds what is missing when the next batch is loaded: all rows if it
is missing, damaged or from another state of the store. Its answers are checked in the store (see store/insert.py), so it may
contain deleted rows, but must not lack any.

Keys are hashed with a secret salt, because senders choose ids.
"""

import contextlib
import logging
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch

from trainspan_collector.runtime.threads import named
from trainspan_schemas.errors import StoreError

__all__ = ["KeyIndex", "KeyIndexError"]

log = logging.getLogger(__name__)

_KEYS: Final[Mapping[str, str]] = {
    "spans": "trace_id || span_id",
    "logs": "'log ' || hex(content_hash)",
    "evaluations": "'evaluation ' || hex(key)",
}
"""Table → SQL expression that identifies a row among the rows of all tables."""
_LIVE: Final[Mapping[str, str]] = {"spans": "live_spans", "logs": "logs", "evaluations": "live_evaluations"}
"""Table → relation of its rows that no richer one replaced."""

_SALT: Final = b"salt"
_COVERED: Final = b"covered"
_SEQ: Final = struct.Struct("<q")
_SALT_BYTES: Final = 16
_ROWS_AT_ONCE: Final = 20_480
_CHECKED_ROWS: Final = 2048
_EXTENSION: Final = 1_000_000
"""Range of `seq` that is added before progress is recorded."""

_FAILURES: Final = 2
"""This many in a row mean damage, not a disk that was temporarily full."""

_WRITE_BUFFER_BYTES: Final = 16 * 2**20
_BLOCK_CACHE_BYTES: Final = 16 * 2**20
_FILTER_BITS: Final = 10
_OPEN_FILES: Final = 256
_LOG_BYTES: Final = 2**20


class KeyIndexError(StoreError):
    """The index cannot be read or written now. Nothing is lost: it can be rebuilt from the store."""


class KeyIndex:
    """For the loader's thread; `count_lacking` and `close` for any. Call `cover` before `find` and `add`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._db: Rdict | None = None
        self._salt = ""
        self._covered = 0
        self._n_failures = 0
        """Since rows were last added."""

    def cover(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Adds the rows of the store that it lacks. Raises KeyIndexError, and duckdb.Error if the store cannot be read."""
        [(last_seq,)] = cursor.execute("SELECT last_seq FROM stored.progress").fetchall()
        if self._db is not None and self._covered == last_seq:
            return
        with self._failures():
            if self._db is None:
                self._open(cursor, last_seq)
            while self._covered < last_seq:
                self._extend(cursor, min(last_seq, self._covered + _EXTENSION))

    def hashes(self, cursor: duckdb.DuckDBPyConnection, table: str, relation: str) -> list[bytes]:
        """The hashed key of each row of `relation`, which has the columns of `table`, in order."""
        rows = cursor.sql(f"SELECT {self._hash(table)} AS hash FROM {relation}").to_arrow_table()
        hashes: list[bytes] = rows["hash"].to_pylist()
        return hashes

    def find(self, hashes: Sequence[bytes]) -> list[int | None]:
        """The `seq` of the row with each hashed key, None if unknown. Raises KeyIndexError."""
        with self._failures():
            assert self._db is not None
            found: list[Any] = self._db.get(list(hashes)) or []
            return [None if value is None else _SEQ.unpack(value)[0] for value in found]

    def add(self, hashes: Sequence[bytes], seqs: Sequence[int], last_seq: int) -> None:
        """Adds committed rows; the store now holds rows up to `last_seq`. The next `cover` makes up for failures."""
        with contextlib.suppress(KeyIndexError), self._failures():
            self._write(hashes, seqs, covered=last_seq)
            self._covered = last_seq
            self._n_failures = 0

    def clear(self) -> None:
        """Deletes everything; the next `cover` rebuilds it."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def count_lacking(self, cursor: duckdb.DuckDBPyConnection, up_to_seq: int) -> int:
        """The number of rows up to `up_to_seq` that it should cover but lacks. Raises KeyIndexError."""
        n_lacking = 0
        for hashes, seqs in self._rows(cursor, f"seq <= {min(up_to_seq, self._covered)}"):
            n_lacking += sum(found is None or found < seq for found, seq in zip(self.find(hashes), seqs, strict=True))
        return n_lacking

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _extend(self, cursor: duckdb.DuckDBPyConnection, to_seq: int) -> None:
        """Adds the rows up to `to_seq` and records that, so that a restart after a kill resumes from there."""
        n_rows = 0
        for hashes, seqs in self._rows(cursor, f"seq > {self._covered} AND seq <= {to_seq}"):
            self._write(hashes, seqs)
            n_rows += len(hashes)
        self._write([], [], covered=to_seq)
        log.info("key index extended rows=%d from_seq=%d to_seq=%d", n_rows, self._covered, to_seq)
        self._covered = to_seq

    def _open(self, cursor: duckdb.DuckDBPyConnection, last_seq: int) -> None:
        try:
            if self._n_failures < _FAILURES:
                self._open_files()
                if self._belongs_to(cursor, last_seq):
                    return
            log.warning("key index is damaged or of another store folder=%s: rebuilding it", self._folder)
        except duckdb.Error:
            self.close()
            raise
        except Exception as error:  # noqa: BLE001  # RocksDB raises nothing more specific
            log.warning("key index cannot be opened folder=%s error=%r: rebuilding it", self._folder, str(error))
        self.clear()
        self._open_files()

    def _open_files(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with named("keys"):  # its threads
            self._db = Rdict(str(self._folder), _options())
        salt, covered = self._db.get(_SALT), self._db.get(_COVERED)
        if salt is None:
            salt, covered = secrets.token_bytes(_SALT_BYTES), None
            self._db[_SALT] = salt
        self._salt = salt.hex()
        self._covered = 0 if covered is None else _SEQ.unpack(covered)[0]

    def _belongs_to(self, cursor: duckdb.DuckDBPyConnection, last_seq: int) -> bool:
        """Whether it has the newest of the rows it should have. A store that was replaced, or lost its newest rows, has others."""
        if self._covered > last_seq:
            return False
        newest = f"seq BETWEEN {self._covered - _CHECKED_ROWS} AND {self._covered}"
        return all(self.find(hashes) == seqs for hashes, seqs in self._rows(cursor, newest))

    def _rows(self, cursor: duckdb.DuckDBPyConnection, condition: str) -> Iterator[tuple[list[bytes], list[int]]]:
        """Hashes and `seq` of stored rows, thousands at a time."""
        for table, live in _LIVE.items():
            query = f"SELECT {self._hash(table)} AS hash, seq FROM stored.{live} WHERE {condition}"
            for batch in cursor.sql(query).to_arrow_reader(_ROWS_AT_ONCE):
                if batch.num_rows:
                    yield _lists(batch)

    def _hash(self, table: str) -> str:
        return f"unhex(left(sha256('{self._salt}' || {_KEYS[table]}), 32))"

    def _write(self, hashes: Sequence[bytes], seqs: Sequence[int], *, covered: int | None = None) -> None:
        assert self._db is not None
        batch = WriteBatch(raw_mode=True)
        for key, seq in zip(hashes, seqs, strict=True):
            batch.put(key, _SEQ.pack(seq))
        if covered is not None:
            batch.put(_COVERED, _SEQ.pack(covered))
        self._db.write(batch)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """After a failure, the next `cover` reopens the index; after two, it rebuilds it."""
        try:
            yield
        except (duckdb.Error, KeyIndexError):
            raise
        except Exception as error:
            self._n_failures += 1
            log.error("key index failed folder=%s error=%r", self._folder, str(error))
            with contextlib.suppress(Exception):
                self.close()
            raise KeyIndexError(f"the key index at {self._folder} failed: {error}") from error


def _lists(batch: pa.RecordBatch) -> tuple[list[bytes], list[int]]:
    return batch.column("hash").to_pylist(), batch.column("seq").to_pylist()


def _options() -> Options:
    """A few megabytes in memory: of the files, only the filters and the block index."""
    blocks = BlockBasedOptions()
    blocks.set_bloom_filter(_FILTER_BITS, block_based=False)
    blocks.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(DBCompressionType.none())  # hashes
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_open_files(_OPEN_FILES)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(_LOG_BYTES)
    options.set_stats_dump_period_sec(0)
    return options

"""Index from keys to the store's rows: a RocksDB database next to the store. It alone decides what is a duplicate, so that this
costs the same however many rows are stored, and wherever they are.

It holds exactly the rows that no richer copy replaced, with what copies are compared by. No stored row is read for a look-up,
so a key of a row that is not stored would lose the next copy of that row. Therefore:

- Keys are added after the commit of their rows. The index knows up to which `seq` it has every row, and adds what is missing
  before the next batch is loaded.
- The store has an `epoch`, a random name that changes in every transaction that deletes such rows, and with every new file. The index
  takes over the new name once it has forgotten the keys of those rows.
- It is rebuilt if it is missing, damaged, of another epoch, or has rows that the store does not.

Keys are hashed with a secret salt, the key of BLAKE2b, because senders choose ids.
"""

import contextlib
import hashlib
import json
import logging
import secrets
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
import pyarrow as pa
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch

from trainspan_collector.rows.spans import SIZE
from trainspan_collector.runtime.threads import named
from trainspan_schemas.errors import StoreError

__all__ = ["Copy", "KeyIndex", "KeyIndexError"]

log = logging.getLogger(__name__)

_MARK: Final = "hash(start_ns // 1000, parent_span_id, name, kind::BIGINT, rollout_id, attempt::BIGINT)"
_IDENTITIES: Final[Mapping[str, str]] = {
    "spans": f"trace_id || span_id || CASE WHEN collides THEN ' ' || {_MARK} ELSE '' END",
    "logs": "'log ' || hex(content_hash)",
    "evaluations": "'evaluation ' || hex(key)",
}
"""Table → SQL expression that identifies a row among the rows of all tables."""
_RANKS: Final[Mapping[str, str]] = {
    "spans": f"richness & {~SIZE} | greatest(end_ns, 0) // 1000",
    "logs": "0",
    "evaluations": "2 * (NOT untrusted)::INTEGER + on_span::INTEGER",
}
"""Table → SQL expression of a row's rank."""
_MARKS: Final[Mapping[str, str]] = {"spans": _MARK, "logs": "0::UBIGINT", "evaluations": "0::UBIGINT"}
"""Table → SQL expression that is equal for two copies of a row, unless one was sent before all of it was known."""
_CONTENTS: Final[Mapping[str, str]] = {
    "spans": "hash(name, status_code, status_message, attributes, events, links)",
    "logs": "0::UBIGINT",
    "evaluations": "0::UBIGINT",
}
"""Table → SQL expression that tells a copy that was sent again from one that says something else."""
_LIVE: Final[Mapping[str, str]] = {"spans": "live_spans", "logs": "logs", "evaluations": "live_evaluations"}
"""Table → relation of its rows that no richer one replaced."""
_STATE: Final = "SELECT last_seq, (SELECT value FROM meta WHERE key = 'epoch') FROM stored.progress"

_HEADER: Final = b"header"
_FORMAT: Final = 5
_COPY: Final = struct.Struct("<qqQQ")
_SALT_BYTES: Final = 16
_KEY_BYTES: Final = 16
_ROWS_AT_ONCE: Final = 20_480
_CHECKED_ROWS: Final = 2048
_EXTENSION: Final = 1_000_000
"""Range of `seq` that is added before progress is recorded."""

_FAILURES: Final = 2
"""This many in a row mean damage, not a disk that was temporarily full."""

_WRITE_BUFFER_BYTES: Final = 4 * 2**20
_BUFFER_FILTER_SHARE: Final = 0.1
"""Most look-ups find nothing, and a filter in front of the write buffer makes them three times as fast."""
_BLOCK_CACHE_BYTES: Final = 16 * 2**20
_FILTER_BITS: Final = 10
_OPEN_FILES: Final = 256
_LOG_BYTES: Final = 2**20


class KeyIndexError(StoreError):
    """The index cannot be read or written now. Nothing is lost: it can be rebuilt from the store."""


class Copy(NamedTuple):
    """A row, as far as it is compared with others of the same key."""

    seq: int
    rank: int
    """The copy of the greatest rank stays; of several, the last one that says something else than the one before."""
    mark: int = 0
    """If it differs, they may be distinct rows with one key."""
    content: int = 0

    def replaces(self, stored: "Copy") -> bool:
        """Whether it stays if it comes after `stored`."""
        return self.rank > stored.rank or (self.rank == stored.rank and self.content != stored.content)


@dataclass(frozen=True, slots=True)
class _Header:
    """The state of the index, written in one batch with the rows."""

    salt: str
    """Hexadecimal digits."""
    epoch: str
    covered: int
    """It has every row up to this `seq`,"""
    reached: int
    """and none after this one."""
    format: int = _FORMAT


_NONE: Final = _Header("", "", 0, 0, format=0)


class KeyIndex:
    """For the loader's thread; `compare` and `close` for any. Call `cover` before `find`, `add` and `deleting`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._db: Rdict | None = None
        self._header = _NONE
        self._n_failures = 0
        """Since rows were last added."""

    def cover(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Makes it the index of the store as it is. Raises KeyIndexError, and duckdb.Error if the store cannot be read."""
        [(last_seq, epoch)] = cursor.execute(_STATE).fetchall()
        if self._db is not None and (self._header.covered, self._header.epoch) == (last_seq, epoch):
            return
        with self._failures():
            if self._db is None or self._header.epoch != epoch or self._header.reached > last_seq:
                self._open(cursor, last_seq, epoch)
            while self._header.covered < last_seq:
                self._extend(cursor, min(last_seq, self._header.covered + _EXTENSION))

    def copies(self, cursor: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> list[tuple[bytes, Copy]]:
        """`rows`, which have the columns of `table`, with their hashed keys, in order."""
        return self._keyed(cursor.from_arrow(rows).project(_columns(table)).to_arrow_table())

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Copy]:
        """The stored rows that have one of these hashed keys. Raises KeyIndexError."""
        with self._failures():
            assert self._db is not None
            asked: list[Any] = list(keys)
            values: list[Any] = self._db.get(asked) or []
            pairs = zip(asked, values, strict=True)
            return {key: Copy._make(_COPY.unpack(value)) for key, value in pairs if value is not None}

    def add(self, rows: Mapping[bytes, Copy], last_seq: int) -> None:
        """Adds committed rows; the store now holds rows up to `last_seq`. The next `cover` makes up for failures."""
        with contextlib.suppress(KeyIndexError), self._failures():
            self._write(rows, replace(self._header, covered=last_seq, reached=last_seq))
            self._n_failures = 0

    @contextlib.contextmanager
    def deleting(
        self, cursor: duckdb.DuckDBPyConnection, condition: str, parameters: Mapping[str, object]
    ) -> Iterator[None]:
        """A transaction whose block deletes the rows of all tables that meet `condition`, an SQL expression.

        Raises duckdb.Error; the caller then rolls back. A failure to forget them leaves an index of another epoch.
        """
        cursor.execute("BEGIN")
        cursor.execute("CREATE OR REPLACE TEMP TABLE gone (identity VARCHAR)")  # they can be more than memory holds
        n_gone, epoch = 0, self._header.epoch
        for table, live in _LIVE.items():
            query = f"INSERT INTO gone SELECT {_IDENTITIES[table]} FROM stored.{live} WHERE {condition}"
            n_gone += cursor.execute(query, dict(parameters)).fetchall()[0][0]
        if n_gone:
            epoch = secrets.token_hex(_SALT_BYTES)
            cursor.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", [epoch])
        yield
        cursor.execute("COMMIT")
        with contextlib.suppress(KeyIndexError), self._failures():
            for batch in cursor.sql("FROM gone").to_arrow_reader(_ROWS_AT_ONCE):
                self._write({}, self._header, gone=self._keys(batch))
            self._write({}, replace(self._header, epoch=epoch))
        cursor.execute("DROP TABLE gone")

    def clear(self) -> None:
        """Deletes everything; the next `cover` rebuilds it."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def compare(self, cursor: duckdb.DuckDBPyConnection, up_to_seq: int) -> tuple[int, int]:
        """The numbers of stored rows that it lacks, and of keys whose row is not stored, both up to `up_to_seq`.

        Raises KeyIndexError if it cannot be read, or if rows were deleted since the snapshot that `cursor` reads.
        """
        limit = min(up_to_seq, self._header.covered)
        with self._failures():
            assert self._db is not None
            seqs = (_COPY.unpack(value)[0] for key, value in self._db.items() if key != _HEADER)
            n_unknown = sum(seq <= limit for seq in seqs)
        n_lacking = n_replaced = 0
        for rows in self._rows(cursor, f"seq <= {limit}"):
            stored = self.find(rows)
            n_replaced += sum(copy.seq > limit for copy in stored.values())  # since the snapshot
            n_equal = sum(stored.get(key) == copy for key, copy in rows.items())
            n_lacking += len(rows) - n_equal
            n_unknown -= n_equal
        [(_, epoch)] = cursor.execute(_STATE).fetchall()
        if self._header.epoch != epoch:
            raise KeyIndexError("rows were deleted meanwhile: verify again")
        return n_lacking - n_replaced, max(0, n_unknown - n_replaced)

    def close(self) -> None:
        """A failure is only logged: what is not on disk is added again by the next `cover`."""
        db, self._db = self._db, None
        if db is not None:
            try:
                db.close()
            except Exception as error:  # noqa: BLE001  # RocksDB raises nothing more specific
                log.warning("key index cannot be closed folder=%s error=%r", self._folder, str(error))

    def _extend(self, cursor: duckdb.DuckDBPyConnection, to_seq: int) -> None:
        """Adds the rows up to `to_seq` and records that, so that a restart after a kill resumes from there."""
        n_rows, from_seq = 0, self._header.covered
        self._write({}, replace(self._header, reached=to_seq))
        for rows in self._rows(cursor, f"seq > {from_seq} AND seq <= {to_seq}"):
            self._write(rows, self._header)
            n_rows += len(rows)
        self._write({}, replace(self._header, covered=to_seq))
        log.info("key index extended rows=%d from_seq=%d to_seq=%d", n_rows, from_seq, to_seq)

    def _open(self, cursor: duckdb.DuckDBPyConnection, last_seq: int, epoch: str) -> None:
        self.close()
        if self._folder.exists():
            try:
                if self._n_failures < _FAILURES:
                    self._open_files()
                    if self._belongs_to(cursor, last_seq, epoch):
                        return
                log.warning("key index is damaged or of another store folder=%s: rebuilding it", self._folder)
            except duckdb.Error:
                self.close()
                raise
            except Exception as error:  # noqa: BLE001  # RocksDB raises nothing more specific
                log.warning("key index cannot be opened folder=%s error=%r: rebuilding it", self._folder, str(error))
            self.clear()
        self._open_files()
        self._write({}, _Header(secrets.token_hex(_SALT_BYTES), epoch, covered=0, reached=0))

    def _open_files(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with named("keys"):  # its threads
            self._db = Rdict(str(self._folder), _options())
        written = self._db.get(_HEADER)
        self._header = _NONE if written is None else _Header(**json.loads(written))

    def _belongs_to(self, cursor: duckdb.DuckDBPyConnection, last_seq: int, epoch: str) -> bool:
        """Whether all of its rows are rows of this store. One that was put back from a copy may have others since."""
        header = self._header
        if header.format != _FORMAT or header.epoch != epoch or header.reached > last_seq:
            return False
        newest = f"seq BETWEEN {header.covered - _CHECKED_ROWS} AND {header.covered}"
        return all(self.find(rows) == rows for rows in self._rows(cursor, newest))

    def _rows(self, cursor: duckdb.DuckDBPyConnection, condition: str) -> Iterator[dict[bytes, Copy]]:
        """Stored rows by hashed key, thousands at a time."""
        for table, live in _LIVE.items():
            query = f"SELECT {_columns(table)} FROM stored.{live} WHERE {condition}"
            for batch in cursor.sql(query).to_arrow_reader(_ROWS_AT_ONCE):
                if batch.num_rows:
                    yield dict(self._keyed(batch))

    def _keyed(self, rows: pa.Table | pa.RecordBatch) -> list[tuple[bytes, Copy]]:
        copies = map(Copy, *(rows.column(name).to_pylist() for name in Copy._fields))
        return list(zip(self._keys(rows), copies, strict=True))

    def _keys(self, rows: pa.Table | pa.RecordBatch) -> list[bytes]:
        """The hashes of the column `identity`."""
        salted = hashlib.blake2b(key=bytes.fromhex(self._header.salt), digest_size=_KEY_BYTES)
        return [_hash(salted.copy(), identity) for identity in rows.column("identity").to_pylist()]

    def _write(self, rows: Mapping[bytes, Copy], header: _Header, *, gone: Iterable[bytes] = ()) -> None:
        assert self._db is not None
        batch = WriteBatch(raw_mode=True)
        for key, copy in rows.items():
            batch.put(key, _COPY.pack(*copy))
        for key in gone:
            batch.delete(key)
        batch.put(_HEADER, json.dumps(asdict(header)).encode())
        self._db.write(batch)
        self._header = header

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
            self.close()
            raise KeyIndexError(f"the key index at {self._folder} failed: {error}") from error


def _columns(table: str) -> str:
    return f"{_IDENTITIES[table]} AS identity, seq, {_RANKS[table]} AS rank, {_MARKS[table]} AS mark, {_CONTENTS[table]} AS content"


def _hash(salted: hashlib.blake2b, identity: str) -> bytes:
    salted.update(identity.encode())
    return salted.digest()


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
    options.set_memtable_prefix_bloom_ratio(_BUFFER_FILTER_SHARE)
    options.set_memtable_whole_key_filtering(True)
    options.set_max_open_files(_OPEN_FILES)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(_LOG_BYTES)
    options.set_stats_dump_period_sec(0)
    return options

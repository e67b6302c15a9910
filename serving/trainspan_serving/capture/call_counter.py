"""Numbers the calls of each rollout from 0 without gaps, even if the server restarts in the middle of one.

A call is identified by the counter's `instance` and its number there: if several servers answer a rollout, each counts
its own calls. Numbers are kept in a SQLite file, so memory is bounded and no rollout is forgotten. Each number is
passed to the kernel before it is returned: a killed server process loses none.
"""

import hashlib
import logging
import sqlite3
import uuid
from collections import OrderedDict
from pathlib import Path

__all__ = ["CallCounter"]

_log = logging.getLogger(__name__)

_MAX_CACHED = 65_536
_MAX_KEY = 100
_KEPT = 40
"""Characters of a longer key that stay readable."""
_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS instance (id TEXT);
CREATE TABLE IF NOT EXISTS calls (key TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
"""
_SAVE = "INSERT INTO calls VALUES (?, ?) ON CONFLICT DO UPDATE SET count = excluded.count"


class CallCounter:
    """Counts per key, for one process and one event loop. Raises OSError if the file cannot be used."""

    def __init__(self, file: Path, *, max_cached: int = _MAX_CACHED) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._max_cached = file, max_cached
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._is_failing = False
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            raise OSError(f"cannot read the call numbers in {file}: {error}; move the file away") from error

    def next(self, key: str) -> int:
        """Returns the next number of `key`. If the disk cannot be written, numbers may repeat after a restart."""
        key = _bounded(key)
        number = self._counts.pop(key, None)
        if number is None:
            number = self._stored(key)
        self._counts[key] = number + 1
        if len(self._counts) > self._max_cached:
            self._counts.popitem(last=False)
        self._save(key, number + 1)
        return number

    def count(self, key: str) -> int:
        """How many numbers of `key` were given out."""
        key = _bounded(key)
        number = self._counts.get(key)
        return self._stored(key) if number is None else number

    def close(self) -> None:
        self._database.close()

    def _open(self) -> None:
        self._database = sqlite3.connect(self._file, isolation_level=None)
        self._file.chmod(0o600)
        self._database.executescript(_TABLES)
        row = self._database.execute("SELECT id FROM instance").fetchone()
        self.instance: str = row[0] if row else uuid.uuid4().hex
        """The id of this counter on every call: 32 hex digits, unchanged across restarts of the server."""
        if not row:
            self._database.execute("INSERT INTO instance VALUES (?)", [self.instance])

    def _stored(self, key: str) -> int:
        try:
            row = self._database.execute("SELECT count FROM calls WHERE key = ?", [key]).fetchone()
        except sqlite3.Error as error:
            self._log_failure(error)
            return 0
        return int(row[0]) if row else 0

    def _save(self, key: str, count: int) -> None:
        try:
            self._database.execute(_SAVE, [key, count])
        except sqlite3.Error as error:
            self._log_failure(error)
        else:
            self._is_failing = False

    def _log_failure(self, error: sqlite3.Error) -> None:
        if not self._is_failing:
            _log.warning("cannot save call numbers file=%s error=%s: a restart would repeat them", self._file, error)
        self._is_failing = True


def _bounded(key: str) -> str:
    """Makes a key storable: it comes from a request and may contain anything, even lone surrogates, in any length.

    A long one becomes its beginning and its hash, which is longer than any short one: the two never meet.
    """
    content = key.encode(errors="backslashreplace")
    text = content.decode()
    return text if len(text) <= _MAX_KEY else f"{text[:_KEPT]}…{hashlib.sha256(content).hexdigest()}"

"""Deletes rows that richer copies replaced, so that neither they nor the list of them, which every view reads, grow without bound.

A replaced row stays for an hour, because a reader that has its number may still fetch its tokens.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import duckdb

__all__ = ["ReplacedRows"]

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 600.0
_KEPT_S: Final = 3600.0
_LEAST: Final = 100_000
_SHARE: Final = 16
"""Deletion scans the numbers of all rows, so it waits for one replaced row in so many: its cost per row stays the same."""
_AT_ONCE: Final = 1_000_000

_COUNTS: Final = """
SELECT (SELECT last_seq FROM stored.progress), (SELECT count(*) FROM stored.superseded), (SELECT count(*) FROM stored.spans)
"""
_LAST: Final = """
SELECT max(by_seq), count(*) FROM (
    SELECT by_seq FROM stored.superseded WHERE by_seq <= $before ORDER BY by_seq LIMIT $at_once
)
"""


class ReplacedRows:
    """Used by the loader's thread. The space of deleted rows is reused."""

    def __init__(self, *, interval_s: float = _INTERVAL_S, kept_s: float = _KEPT_S, least: int = _LEAST) -> None:
        """Nothing is deleted while fewer than `least` rows are replaced."""
        self._interval_s = interval_s
        self._kept_s = kept_s
        self._least = least
        self._due = time.monotonic() + interval_s
        self._seen: deque[tuple[float, int]] = deque()
        """When which `seq` was the last one."""
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It is never due during the block, which is for any thread: a rewrite must see all that replaced what it has copied."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def is_due(self) -> bool:
        return not self._is_paused and time.monotonic() >= self._due

    def apply(self, cursor: duckdb.DuckDBPyConnection) -> int:
        """Deletes what was replaced long ago, in one transaction; returns the number of rows."""
        now = time.monotonic()
        self._due = now + self._interval_s
        [(last_seq, n_replaced, n_spans)] = cursor.execute(_COUNTS).fetchall()
        self._seen.append((now, last_seq))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._kept_s:
            self._seen.popleft()
        at, before = self._seen[0]
        if at > now - self._kept_s or n_replaced < max(self._least, n_spans // _SHARE):
            return 0
        n_rows: int
        [(to_seq, n_rows)] = cursor.execute(_LAST, {"before": before, "at_once": _AT_ONCE}).fetchall()
        if not n_rows:
            return 0
        replaced = "SELECT seq FROM stored.superseded WHERE by_seq <= ?"
        cursor.execute("BEGIN")
        for table in ("spans", "evaluations"):
            cursor.execute(f"DELETE FROM stored.{table} WHERE seq IN ({replaced})", [to_seq])
        cursor.execute("DELETE FROM stored.superseded WHERE by_seq <= ?", [to_seq])
        cursor.execute("COMMIT")
        if n_rows == _AT_ONCE:
            self._due = now
        log.info("replaced rows deleted rows=%d of=%d", n_rows, n_replaced)
        return n_rows

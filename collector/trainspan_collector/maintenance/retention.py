"""Retention: deletes traces whose newest row is older than a number of days, while the collector runs.

Age counts from when the collector received a row, on a clock that is set once at process start: neither a sender's clock nor
a jump of this machine's clock can make rows old.
"""

import logging
import time
from typing import Final

import duckdb

from trainspan_collector.maintenance.selection import GONE, Criteria, select

__all__ = ["Retention"]

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 600.0
_DAY_NS: Final = 86_400 * 10**9


class Retention:
    """Used by the loader's thread. The space of deleted rows is reused; `compact` returns it to the disk."""

    def __init__(self, days: float, *, interval_s: float = _INTERVAL_S) -> None:
        self._age_ns = int(days * _DAY_NS)
        self._interval_s = interval_s
        self._due = time.monotonic()
        self._began_ns = time.time_ns() - _since_boot_ns()

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def apply(self, cursor: duckdb.DuckDBPyConnection) -> int:
        """Deletes what is too old, in one transaction; returns the number of rows."""
        self._due = time.monotonic() + self._interval_s
        before_ns = self._began_ns + _since_boot_ns() - self._age_ns
        selection = select(cursor, Criteria(before_ns=before_ns))
        selection.register(cursor)
        cursor.execute("BEGIN")
        n_rows = 0
        for table in ("spans", "logs", "evaluations"):
            [(n_deleted,)] = cursor.execute(f"DELETE FROM stored.{table} WHERE {GONE}", selection.parameters).fetchall()
            n_rows += n_deleted
            cursor.execute(f"DELETE FROM stored.{table} WHERE seq IS NULL AND received_ns < ?", [before_ns])
        cursor.execute(
            "DELETE FROM stored.superseded WHERE seq NOT IN"
            " (SELECT seq FROM stored.spans WHERE seq IS NOT NULL"
            " UNION ALL SELECT seq FROM stored.evaluations WHERE seq IS NOT NULL)"
        )
        cursor.execute("COMMIT")
        if n_rows:
            log.warning("retention traces=%d rows=%d", selection.traces.num_rows, n_rows)
        return n_rows


def _since_boot_ns() -> int:
    """A clock that keeps running while the machine sleeps, and never jumps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

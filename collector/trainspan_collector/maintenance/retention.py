"""Retention: deletes traces whose newest row is older than a number of days, while the collector runs.

Age counts from when the collector received a row, not from a sender's clock, up to the earlier of two clocks: this machine's,
and one that is set once at process start. So a clock that is set forward, or was ahead at the start and is set back, makes no
row old. A row that arrives while the clock is behind counts as that much older.
"""

import logging
import time
from typing import Final

import duckdb

from trainspan_collector.maintenance.selection import GONE, Criteria, select
from trainspan_collector.store.insert import drop_empty_places
from trainspan_collector.store.key_index import KeyIndex

__all__ = ["Retention"]

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 600.0
_DAY_NS: Final = 86_400 * 10**9


class Retention:
    """Used by the loader's thread. The space of deleted rows is reused; `compact` returns it to the disk."""

    def __init__(self, days: float, index: KeyIndex, *, interval_s: float = _INTERVAL_S) -> None:
        self._index = index
        self._age_ns = int(days * _DAY_NS)
        self._interval_s = interval_s
        self._due = time.monotonic()
        self._began_ns = time.time_ns() - _since_boot_ns()

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def apply(self, cursor: duckdb.DuckDBPyConnection) -> int:
        """Deletes what is too old, in one transaction; returns the number of rows. The key index must cover the store."""
        self._due = time.monotonic() + self._interval_s
        before_ns = min(self._began_ns + _since_boot_ns(), time.time_ns()) - self._age_ns
        selection = select(cursor, Criteria(before_ns=before_ns))
        selection.register(cursor)
        n_rows = 0
        with self._index.deleting(cursor, GONE, selection.parameters):
            for table in ("spans", "evaluations"):
                gone = f"SELECT seq FROM stored.{table} WHERE seq IN (SELECT seq FROM stored.superseded) AND {GONE}"
                cursor.execute(f"DELETE FROM stored.superseded WHERE seq IN ({gone})", selection.parameters)
            for table in ("spans", "logs", "evaluations"):
                delete = f"DELETE FROM stored.{table} WHERE {GONE}"
                n_rows += cursor.execute(delete, selection.parameters).fetchall()[0][0]
                cursor.execute(f"DELETE FROM stored.{table} WHERE seq IS NULL AND received_ns < ?", [before_ns])
            if n_rows:
                drop_empty_places(cursor)
        if n_rows:
            log.warning("retention traces=%d rows=%d", selection.traces.num_rows, n_rows)
        return n_rows


def _since_boot_ns() -> int:
    """A clock that keeps running while the machine sleeps, and never jumps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

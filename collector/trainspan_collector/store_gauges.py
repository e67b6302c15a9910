"""The current state of the store, for metrics."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.load.loader import Loader
from trainspan_collector.receive.admission import Admission
from trainspan_collector.receive.memory_budget import MemoryBudget
from trainspan_collector.runtime.metrics import StoreState
from trainspan_collector.store.database import Database

__all__ = ["StoreGauges"]


@dataclass(frozen=True, slots=True)
class StoreGauges:
    """The parts from which the state is read."""

    store: Path
    database: Database
    journal: Journal
    loader: Loader
    admission: Admission
    budget: MemoryBudget
    quarantine: Quarantine
    backlog: Backlog

    def state(self) -> StoreState:
        """Reads without stopping anything, so the figures are from slightly different moments."""
        position, lag_s, backlog_s = self.loader.position, self._lag_s(), self.backlog.seconds()
        return StoreState(
            ready=self.admission.disk_has_room(),
            inflight_bytes=self.budget.n_bytes,
            queued_requests=self.journal.n_pending,
            last_commit_age_s=time.monotonic() - self.journal.last_commit,
            journal_bytes=self.journal.n_bytes(),
            loader_lag_bytes=self.journal.bytes_after(position),
            loader_lag_s=lag_s,
            backlog_s=lag_s if backlog_s is None else backlog_s,
            disk_free_bytes=self.admission.free_disk_bytes,
            store_bytes=self.store.stat().st_size + self.database.wal_bytes(),
            quarantined_requests=self.quarantine.n_requests,
            loads_put_off=self.loader.n_put_off,
        )

    def _lag_s(self) -> float:
        with contextlib.suppress(OSError):  # loaded and deleted meanwhile, or too many open files
            entries, _ = self.journal.read(self.loader.position, 1)
            if entries:
                return max(0.0, time.time() - entries[0].frame.received_ns / 1e9)
        return 0.0

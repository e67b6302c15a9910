"""The parts of a collector that load and maintain a store, without its listeners, in the test's own process."""

from collections.abc import Sequence
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector.process import trace_request
from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.frames import Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.load.committer import Committer
from trainspan_collector.load.loader import Loader
from trainspan_collector.maintenance.actions import Maintenance
from trainspan_collector.maintenance.replaced_rows import ReplacedRows
from trainspan_collector.store.database import Database
from trainspan_collector.store.key_index import KeyIndex
from trainspan_collector.store.snapshots import Readers
from trainspan_collector.store.sql_process import SqlLimits

__all__ = ["LoadedStore"]

_MEMORY_BYTES = 2**28


class LoadedStore:
    """A store with a running loader; must be closed."""

    def __init__(self, folder: Path, replaced_rows: ReplacedRows) -> None:
        path = folder / "spans.duckdb"
        self.quarantine = folder / "spans.duckdb.quarantine"
        self.n_failures = 0
        """How often the loader said that it cannot continue."""
        self.database = Database(path, memory_bytes=_MEMORY_BYTES)
        self._readers = Readers(SqlLimits(60, 2**29))
        self._journal = Journal(folder / "spans.duckdb.journal")
        self._index = KeyIndex(folder / "spans.duckdb.keys")
        committer = Committer(
            self.database,
            self._journal,
            self._index,
            checkpoint_bytes=2**26,
            admit_checkpoint=self._readers.admit_checkpoint,
            on_loaded=lambda counts: None,
        )
        self.loader = Loader(
            self._journal,
            Quarantine(self.quarantine),
            committer,
            interval_s=0.01,
            max_bytes=2**20,
            on_failure=self._count_failure,
            chores=[replaced_rows],
        )
        self.maintenance = Maintenance(
            path,
            self.database,
            self._journal,
            self.loader,
            self._index,
            self._readers,
            Backlog(self._journal, lambda: self.loader.position, least_bytes=2**20),
            replaced_rows,
            memory_bytes=_MEMORY_BYTES,
        )
        self.loader.start()

    def send(self, spans: Sequence[Span]) -> None:
        """Returns once they are loaded."""
        self.send_body(trace_request(*spans).SerializeToString())

    def send_body(self, body: bytes) -> None:
        """Returns once it is loaded or quarantined."""
        self._journal.append(Signal.TRACES, body, 1)
        assert self.loader.wait_for(self._journal.end(), 30)

    def close(self) -> None:
        self._journal.close()
        self.loader.stop()
        self._index.close()
        self._readers.close()
        self.database.close()

    def _count_failure(self) -> None:
        self.n_failures += 1

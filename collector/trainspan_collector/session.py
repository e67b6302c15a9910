"""One session with an open store: journal, loader and readers, started in order and stopped in reverse order."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.load.committer import Chore, Committer
from trainspan_collector.load.loader import Loader
from trainspan_collector.maintenance.actions import Maintenance
from trainspan_collector.maintenance.replaced_rows import ReplacedRows
from trainspan_collector.maintenance.retention import Retention
from trainspan_collector.maintenance.rewrite import remove_leftovers
from trainspan_collector.query.flight_server import ReadableStore
from trainspan_collector.receive.admission import Admission
from trainspan_collector.servers import Servers
from trainspan_collector.store.database import Database
from trainspan_collector.store.key_index import KeyIndex
from trainspan_collector.store.snapshots import Readers
from trainspan_collector.store.sql_process import SqlLimits, remove_query_folders
from trainspan_collector.store_gauges import StoreGauges
from trainspan_schemas.config.settings import CollectorSettings

__all__ = ["StoreSession", "journal_folder"]


class StoreSession:
    """A context in which the listeners take requests. Leaving it drains: everything acknowledged is loaded and checkpointed."""

    def __init__(self, store: Path, settings: CollectorSettings, memory_bytes: int, servers: Servers) -> None:
        """`memory_bytes` is DuckDB's memory limit."""
        self._store = store
        self._settings = settings
        self._memory_bytes = memory_bytes
        self._servers = servers
        self._cleanup = contextlib.ExitStack()
        self._loader: Loader | None = None

    @property
    def failure(self) -> Exception | None:
        """The error that ended loading; None if there is none."""
        return self._loader.failure if self._loader else None

    def open(self, on_failure: Callable[[], None]) -> None:
        """Starts all parts; `on_failure` is called if loading cannot continue. Raises StoreError or ReopenError."""
        store, settings, servers, cleanup = self._store, self._settings, self._servers, self._cleanup
        remove_leftovers(store)
        remove_query_folders(store.with_name(store.name + ".tmp"))
        database = Database(store, memory_bytes=self._memory_bytes)
        cleanup.callback(database.close)
        readers = Readers(SqlLimits(settings.sql_timeout_s, settings.sql_memory_bytes))
        cleanup.callback(readers.close)
        segment = database.progress().position.segment
        journal = Journal(journal_folder(store), segment, on_commit=servers.metrics.committed)
        quarantine = Quarantine(store.with_name(store.name + ".quarantine"))
        index = KeyIndex(store.with_name(store.name + ".keys"))
        cleanup.callback(index.close)
        replaced_rows = ReplacedRows()
        chores: list[Chore] = [replaced_rows]
        if settings.retention_days is not None:
            chores.append(Retention(settings.retention_days, index))
        committer = Committer(
            database,
            journal,
            index,
            checkpoint_bytes=settings.checkpoint_bytes,
            admit_checkpoint=readers.admit_checkpoint,
            on_loaded=servers.metrics.loaded,
        )
        loader = self._loader = Loader(
            journal,
            quarantine,
            committer,
            interval_s=settings.load_interval_s,
            max_bytes=settings.load_max_bytes,
            on_failure=on_failure,
            chores=chores,
        )
        backlog = Backlog(journal, lambda: loader.position, least_bytes=settings.load_max_bytes)
        maintenance = Maintenance(
            store, database, journal, loader, index, readers, backlog, replaced_rows, memory_bytes=self._memory_bytes
        )
        admission = Admission(
            journal,
            journal.folder,
            min_free_disk_bytes=settings.min_free_disk_bytes,
            wait_s=settings.overload_wait_s,
            backlog=backlog,
        )
        servers.bind()
        loader.start()
        cleanup.callback(loader.stop)
        cleanup.callback(servers.shut_readers)  # runs before loader.stop: its last checkpoint waits for no query
        cleanup.callback(journal.close)
        cleanup.callback(servers.shut)
        servers.open_to(
            admission,
            StoreGauges(store, database, journal, loader, admission, servers.budget, quarantine, backlog).state,
            ReadableStore(database, journal, loader, readers, maintenance),
        )

    def __enter__(self) -> "StoreSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.__exit__(kind, error, trace)


def journal_folder(store: Path) -> Path:
    """The folder of the store's journal."""
    return store.with_name(store.name + ".journal")

"""The collector as one process: everything started in order, drained in the reverse order."""

import contextlib
import logging
import os
import resource
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import FrameType

from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.load.loader import Loader
from trainspan_collector.maintenance.actions import Maintenance
from trainspan_collector.maintenance.retention import Retention
from trainspan_collector.maintenance.rewrite import remove_leftovers
from trainspan_collector.network.access import Access
from trainspan_collector.network.credentials import Guard
from trainspan_collector.network.ports import Address, Tls
from trainspan_collector.query.flight_server import Reading
from trainspan_collector.receive.admission import Admission
from trainspan_collector.runtime.memory import available_memory_bytes, bound_freed_memory, collect_rarely
from trainspan_collector.runtime.metrics import Metrics
from trainspan_collector.servers import Servers
from trainspan_collector.store.database import Database
from trainspan_collector.store.duckdb_errors import ReopenError, first_line
from trainspan_collector.store.key_index import KeyIndex
from trainspan_collector.store.lock import StoreLock
from trainspan_collector.store.snapshots import Readers
from trainspan_collector.store.sql_process import SqlLimits, remove_query_folders
from trainspan_collector.store_gauges import StoreGauges
from trainspan_schemas.errors import ConfigError, StoreError
from trainspan_schemas.home import store_path
from trainspan_schemas.roles import Role, make_home_token_file
from trainspan_schemas.settings import CollectorSettings
from trainspan_schemas.store import StoreAddress, address_file, is_last_reader, readers_file, write_address

__all__ = ["run"]

log = logging.getLogger(__name__)

_REOPEN_S = 0.5
_READERS_CHECK_S = 0.5
_MOST_FILES = 8192
_BLOCK_BYTES = 1024 * 1024  # more than most requests
_KEPT_BYTES = 32 * 1024 * 1024


def run(settings: CollectorSettings, on_ready: Callable[[StoreAddress], None], *, for_readers: bool = False) -> None:
    """Collects until SIGTERM or SIGINT, then loads what was acknowledged, checkpoints and returns.

    Raises ConfigError for addresses, tokens or certificates that cannot be meant, StoreLockedError where another process has the store,
    StoreError where a port is taken, the store cannot be opened, or loading failed on the way.

    `for_readers`: it also ends when nobody holds the readers' lock, lets in only who can read the address file, and
    deletes nothing for its age.
    """
    if for_readers:
        settings = replace(settings, retention_days=None)
    if settings.flight == "off":
        raise ConfigError("--flight off: the store is read through Flight alone; give --flight HOST:PORT")
    token_file = None if for_readers else _token_file(settings)
    access = Access.from_file(token_file, admits_agents=not settings.token_file) if token_file else Access({})
    own_token = secrets.token_urlsafe(32)
    guard = Guard(
        access.with_token(own_token, Role.RUNNER), Tls.load(settings.tls_cert, settings.tls_key), own_token, token_file
    )
    remote = settings.insecure_allow_remote or (guard.tls is not None and settings.token_file is not None)
    grpc = None if settings.grpc == "off" else Address.parse("--grpc", settings.grpc, allow_remote=remote)
    http = None if settings.http == "off" else Address.parse("--http", settings.http, allow_remote=remote)
    flight = Address.parse("--flight", settings.flight, allow_remote=remote)
    os.umask(0o077)
    _allow_many_connections()
    bound_freed_memory(_BLOCK_BYTES, _KEPT_BYTES)
    collect_rarely()
    memory_bytes = settings.duckdb_memory_bytes
    servers = Servers(settings, grpc, http, guard, Metrics(), flight=flight)
    store = store_path(settings.store).resolve()
    with _stop_signal() as stop, _locked(store), contextlib.closing(servers), contextlib.ExitStack() as told:
        address = None
        while True:
            try:
                with contextlib.ExitStack() as cleanup:
                    loader = _start(store, settings, memory_bytes, servers, stop, cleanup)
                    address = address or _tell_address(store, servers, for_readers, told)
                    on_ready(address)
                    if for_readers:
                        cleanup.callback(os.close, _watch_readers(store))
                    while stop.wait() is _Asked.TO_RELOAD:
                        if not (settings.token_file or guard.tls):
                            stop.asked = True  # a terminal that was closed
                            break
                        guard.reload()
                    log.info("draining")
                failure = loader.failure
            except ReopenError as error:
                failure = error
            if failure is None:
                return
            if not isinstance(failure, ReopenError) or (stop.asked and not failure.lacks_memory):
                raise StoreError(
                    f"loading failed, the journal keeps what was acknowledged: {first_line(failure)}"
                ) from failure
            if failure.lacks_memory:
                memory_bytes = _more_memory(memory_bytes, failure)
            log.error("opening the store again duckdb_memory_bytes=%d reason=%r", memory_bytes, first_line(failure))
            time.sleep(_REOPEN_S)


def _token_file(settings: CollectorSettings) -> Path:
    """The one that was configured, else that of the state folder. Raises ConfigError where that cannot be made."""
    return (Path(settings.token_file) if settings.token_file else make_home_token_file()).resolve()


def _allow_many_connections() -> None:
    """As many open files as the listeners may have connections: with the usual 1,024 the journal could lack one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _more_memory(memory_bytes: int, failure: ReopenError) -> int:
    """Twice the memory, up to half of what there is. Raises StoreError where that is used up."""
    most = available_memory_bytes() // 2
    if memory_bytes >= most:
        raise StoreError(f"DuckDB needs more than {memory_bytes} bytes of memory: {first_line(failure)}") from failure
    return min(2 * memory_bytes, most)


@contextlib.contextmanager
def _locked(store: Path) -> Iterator[None]:
    """The right to write the store, also while it is opened again."""
    _journal_folder(store).mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = StoreLock(store)
    try:
        yield
    finally:
        lock.release()


def _journal_folder(store: Path) -> Path:
    return store.with_name(store.name + ".journal")


def _start(
    store: Path,
    settings: CollectorSettings,
    memory_bytes: int,
    servers: Servers,
    stop: "_Stop",
    cleanup: contextlib.ExitStack,
) -> Loader:
    """Starts all parts; `cleanup` ends them: intake, journal, loader, readers, DuckDB."""
    folder = _journal_folder(store)
    remove_leftovers(store)
    remove_query_folders(store.with_name(store.name + ".tmp"))
    database = Database(store, memory_bytes=memory_bytes)
    cleanup.callback(database.close)
    readers = Readers(SqlLimits(settings.sql_timeout_s, settings.sql_memory_bytes))
    cleanup.callback(readers.close)
    journal = Journal(folder, database.progress().position.segment, on_commit=servers.metrics.committed)
    quarantine = Quarantine(store.with_name(store.name + ".quarantine"))
    index = KeyIndex(store.with_name(store.name + ".keys"))
    cleanup.callback(index.close)
    loader = Loader(
        database,
        journal,
        quarantine,
        index,
        interval_s=settings.load_interval_s,
        max_bytes=settings.load_max_bytes,
        checkpoint_bytes=settings.checkpoint_bytes,
        make_way=readers.make_way,
        on_loaded=servers.metrics.loaded,
        on_failure=stop.set,
        retention=None if settings.retention_days is None else Retention(settings.retention_days),
    )
    backlog = Backlog(journal, lambda: loader.position, least_bytes=settings.load_max_bytes)
    maintenance = Maintenance(store, database, journal, loader, readers, backlog, memory_bytes=memory_bytes)
    admission = Admission(
        journal,
        folder,
        min_free_disk_bytes=settings.min_free_disk_bytes,
        wait_s=settings.overload_wait_s,
        backlog=backlog,
    )
    servers.bind()
    loader.start()
    cleanup.callback(loader.stop)
    cleanup.callback(servers.shut_readers)  # first, since the loader's last checkpoint waits for no query
    cleanup.callback(journal.close)
    cleanup.callback(servers.shut)
    servers.open_to(
        admission,
        StoreGauges(store, database, journal, loader, admission, servers.budget, quarantine, backlog).state,
        Reading(database, journal, loader, readers, maintenance),
    )
    return loader


def _tell_address(store: Path, servers: Servers, for_readers: bool, told: contextlib.ExitStack) -> StoreAddress:
    """Writes the address file, which is true until `told` ends: readers who come while the store is opened again wait at Flight."""
    address = StoreAddress(
        pid=os.getpid(),
        store=str(store),
        grpc=servers.grpc_address,
        http=servers.http_address,
        flight=servers.flight_address or "",
        tls=servers.guard.tls is not None,
        token=servers.guard.own_token,
        token_file=str(servers.guard.token_file) if servers.guard.token_file else None,
        for_readers=for_readers,
    )
    told.callback(os.close, write_address(address))
    told.callback(address_file(store).unlink, missing_ok=True)
    return address


def _watch_readers(store: Path) -> int:
    """Stops the process when no reader is left, should the last one have died without doing so; the lock it uses."""
    lock = os.open(readers_file(store), os.O_RDWR | os.O_CREAT, 0o600)

    def watch() -> None:
        with contextlib.suppress(OSError):  # closed: the process ends
            while not is_last_reader(lock):
                time.sleep(_READERS_CHECK_S)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="readers", daemon=True).start()
    return lock


class _Asked(Enum):
    TO_STOP = "to stop"
    TO_RELOAD = "to reload"


class _Stop:
    """A flag that any thread, and a signal whichever thread it meets, can set: a pipe that the main thread reads."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.asked = False
        """Whether it was a signal: then it stays set."""

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: set often enough
            os.write(self.write_end, bytes(1))

    def wait(self) -> _Asked:
        if not self.asked:
            number = os.read(self._read, 1)[0]  # the interpreter writes a signal's number
            if number == signal.SIGHUP:
                return _Asked.TO_RELOAD
            self.asked = number != 0
        return _Asked.TO_STOP


@contextlib.contextmanager
def _stop_signal() -> Iterator[_Stop]:
    """Turns SIGTERM, SIGINT and SIGHUP into a flag for the time of the block, draining included."""
    stop = _Stop()
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    wakeup_before = signal.set_wakeup_fd(stop.write_end, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The interpreter has written the signal to the pipe already."""

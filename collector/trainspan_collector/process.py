"""The collector process: starts everything in order, and drains it in reverse order."""

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
from pathlib import Path

from trainspan_collector.network.access import Access
from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.ports import Address, Tls
from trainspan_collector.runtime.memory import bound_freed_memory, collect_rarely, keep_pandas_out
from trainspan_collector.runtime.metrics import Metrics
from trainspan_collector.runtime.shutdown import SignalAction, stop_signal
from trainspan_collector.servers import Servers
from trainspan_collector.session import StoreSession, journal_folder
from trainspan_collector.store.duckdb_errors import ReopenError, first_line
from trainspan_collector.store.lock import StoreLock
from trainspan_schemas.config.settings import CollectorSettings
from trainspan_schemas.errors import ConfigError, StoreError
from trainspan_schemas.home import store_path
from trainspan_schemas.resources import available_memory_bytes
from trainspan_schemas.store.access import StoreAddress, address_file, is_last_reader, readers_file, write_address
from trainspan_schemas.store.roles import Role, make_home_token_file

__all__ = ["run"]

log = logging.getLogger(__name__)

_REOPEN_S = 0.5
_READERS_CHECK_S = 0.5
_MOST_FILES = 8192
_BLOCK_BYTES = 1024 * 1024  # more than most requests
_KEPT_BYTES = 32 * 1024 * 1024


def run(settings: CollectorSettings, on_ready: Callable[[StoreAddress], None], *, for_readers: bool = False) -> None:
    """Collects until SIGTERM or SIGINT, then loads everything acknowledged, checkpoints and returns.

    Raises ConfigError for invalid addresses, tokens or certificates, StoreLockedError if another process has the store,
    StoreError if a port is in use, the store cannot be opened, or loading has failed.

    `for_readers`: it also stops once nobody holds the readers' lock, admits only clients that can read the address file,
    and never deletes rows by age.
    """
    if for_readers:
        settings = replace(settings, retention_days=None)
    if settings.flight == "off":
        raise ConfigError("--flight off: the store can be read only through Flight; set --flight HOST:PORT")
    guard = _guard(settings, None if for_readers else _token_file(settings))
    remote = settings.insecure_allow_remote or (guard.tls is not None and settings.token_file is not None)
    grpc = None if settings.grpc == "off" else Address.parse("--grpc", settings.grpc, allow_remote=remote)
    http = None if settings.http == "off" else Address.parse("--http", settings.http, allow_remote=remote)
    flight = Address.parse("--flight", settings.flight, allow_remote=remote)
    _prepare_process()
    memory_bytes = settings.duckdb_memory_bytes
    servers = Servers(settings, grpc, http, guard, Metrics(), flight=flight)
    store = store_path(settings.store).resolve()
    with (
        stop_signal() as stop,
        _locked(store),
        _watched_readers(store) if for_readers else contextlib.nullcontext(),
        contextlib.closing(servers),
        contextlib.ExitStack() as announced,
    ):
        address = None
        while True:
            try:
                with StoreSession(store, settings, memory_bytes, servers) as session:
                    session.open(on_failure=stop.set)
                    address = address or _announce_address(store, servers, for_readers, announced)
                    on_ready(address)
                    while stop.wait() is SignalAction.RELOAD:
                        if not (settings.token_file or guard.tls):
                            stop.asked = True  # the terminal was closed
                            break
                        guard.reload()
                    log.info("draining")
                failure = session.failure
            except ReopenError as error:
                failure = error
            if failure is None:
                return
            if not isinstance(failure, ReopenError) or (stop.asked and not failure.lacks_memory):
                raise StoreError(
                    f"loading failed, the journal keeps the acknowledged data: {first_line(failure)}"
                ) from failure
            if failure.lacks_memory:
                memory_bytes = _more_memory(memory_bytes, failure)
            log.error("reopening the store duckdb_memory_bytes=%d reason=%r", memory_bytes, first_line(failure))
            time.sleep(_REOPEN_S)


def _token_file(settings: CollectorSettings) -> Path:
    """The configured token file, else the one in the state folder. Raises ConfigError if that cannot be created."""
    return (Path(settings.token_file) if settings.token_file else make_home_token_file()).resolve()


def _guard(settings: CollectorSettings, token_file: Path | None) -> AccessControl:
    access = Access.from_file(token_file, admits_agents=not settings.token_file) if token_file else Access({})
    own_token = secrets.token_urlsafe(32)
    tls = Tls.load(settings.tls_cert, settings.tls_key)
    return AccessControl(access.with_token(own_token, Role.RUNNER), tls, own_token, token_file)


def _prepare_process() -> None:
    os.umask(0o077)
    _allow_many_connections()
    bound_freed_memory(_BLOCK_BYTES, _KEPT_BYTES)
    keep_pandas_out()
    collect_rarely()


def _allow_many_connections() -> None:
    """Allows as many open files as the listeners may need: at the usual 1,024, the journal could run out of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _more_memory(memory_bytes: int, failure: ReopenError) -> int:
    """Twice the memory, up to half of what is available. Raises StoreError if that is already reached."""
    most = available_memory_bytes() // 2
    if memory_bytes >= most:
        raise StoreError(f"DuckDB needs more than {memory_bytes} bytes of memory: {first_line(failure)}") from failure
    return min(2 * memory_bytes, most)


@contextlib.contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Holds the store's write lock, even while the store is reopened."""
    journal_folder(store).mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = StoreLock(store)
    try:
        yield
    finally:
        lock.release()


def _announce_address(
    store: Path, servers: Servers, for_readers: bool, announced: contextlib.ExitStack
) -> StoreAddress:
    """Writes the address file, which is valid until `announced` exits: readers that connect while the store is reopened wait in Flight."""
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
    announced.callback(os.close, write_address(address))
    announced.callback(address_file(store).unlink, missing_ok=True)
    return address


@contextlib.contextmanager
def _watched_readers(store: Path) -> Iterator[None]:
    """Stops the process once no reader is left during the block, in case the last one died without doing so."""
    lock = os.open(readers_file(store), os.O_RDWR | os.O_CREAT, 0o600)
    ended = threading.Event()

    def watch() -> None:
        while not is_last_reader(lock):
            if ended.wait(_READERS_CHECK_S):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=watch, name="readers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()  # the number of a closed descriptor may soon be that of another file
        os.close(lock)

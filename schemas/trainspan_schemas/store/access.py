"""Access to the store for readers: `<store>.json` names the running collector; if none runs, a reader starts one.

The Flight protocol: a ticket is JSON, `{"sql": "SELECT …"}` for a user's query or `{"read": name, "parameters": {…}}` for
a named read; `wait_ms` bounds the wait for the loader. The answer's schema metadata has `watermark`, the highest `seq` loaded.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from trainspan_schemas.errors import ProcessError, StoreError
from trainspan_schemas.files.locks import is_locked, locked, try_lock
from trainspan_schemas.store.endpoint import StoreEndpoint

__all__ = [
    "StoreAddress",
    "address_file",
    "is_last_reader",
    "lock_file",
    "open_store",
    "readers_file",
    "running_collector",
    "server_message",
    "write_address",
]

_DAMAGED: Final = ("Corrupt database file", "IO Error: Failed to read", "IO Error: Could not read enough bytes")
"""Beginnings of DuckDB's messages about a file that is not what it wrote."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The published address of a running collector; addresses are `HOST:PORT`, or None if that listener is off."""

    pid: int
    store: str
    grpc: str | None
    http: str | None
    flight: str
    tls: bool = False
    """Whether all listeners use TLS."""
    token: str | None = None
    """If tokens are in use: one for readers of this file, new at each start."""
    token_file: str | None = None
    """If senders use tokens too: the file with one for each role."""
    for_readers: bool = False
    """Whether readers started it; it then takes no telemetry and ends with the last of them."""

    @property
    def endpoint(self) -> StoreEndpoint:
        """The endpoint for readers; no certificate is checked, since only this user can write the file."""
        scheme = "grpc+tls" if self.tls else "grpc"
        authorization = f"Bearer {self.token}" if self.token else None
        return StoreEndpoint(f"{scheme}://{self.flight}", authorization, verify=False)


def address_file(store: Path) -> Path:
    """`spans.duckdb` → `spans.duckdb.json`, mode 0600, written when the collector is ready, removed when it stops."""
    return store.with_name(store.name + ".json")


def write_address(address: StoreAddress) -> int:
    """Writes the address file atomically with mode 0600; returns a descriptor to keep open while the address is valid.

    It holds a lock on the file, which the kernel releases with the process: a killed collector leaves the file, not the lock.
    """
    path = address_file(Path(address.store))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try_lock(descriptor)
    os.write(descriptor, json.dumps(asdict(address)).encode())
    temporary.replace(path)
    return descriptor


def running_collector(store: Path) -> StoreAddress | None:
    """The collector that owns `store` now; None if the file is missing or unlocked."""
    try:
        with address_file(store).open() as file:
            return None if try_lock(file, shared=True) else StoreAddress(**json.load(file))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def server_message(error: Exception) -> str:
    """The collector's text in an error of Arrow Flight, without gRPC's additions, and what to do if the store is damaged."""
    text = str(error).strip().partition(". Detail:")[0].partition(". gRPC client debug context")[0]
    text = text or type(error).__name__
    return f"{text}; the store is damaged: put back a copy of it" if text.startswith(_DAMAGED) else text


@contextlib.contextmanager
def open_store(store: str, *, start_timeout_s: float = 900.0) -> Iterator[StoreEndpoint]:
    """Yields the endpoint of a store, given by its path or as `grpc://HOST:PORT` or `grpc+tls://HOST:PORT`.

    For a path without a running collector one is started; concurrent readers share it, and the last one stops it.
    Raises StoreError if the path does not exist, ProcessError if the collector does not start.
    """
    if store.startswith(("grpc://", "grpc+tls://")):
        yield StoreEndpoint.of_address(store, os.environ)
        return
    path = Path(store)
    address = running_collector(path)
    if address is not None and not address.for_readers:
        yield address.endpoint
        return
    if not path.exists() and not _journal(path).exists():
        raise StoreError(
            f"no store at {path}: start `trainspan collector` and run an agent first, or name one with --store"
        )
    _journal(path).mkdir(mode=0o700, exist_ok=True)
    with locked(readers_file(path), shared=True) as reading:  # waits while the last one's collector ends
        with locked(_journal(path) / "starting"):
            address = running_collector(path) or _start_collector(path, start_timeout_s)
        try:
            yield address.endpoint
        finally:
            if address.for_readers and is_last_reader(reading):
                _stop_collector(path, address)


def lock_file(store: Path) -> Path:
    """The file that is locked by the process that has the store open."""
    return _journal(store) / "lock"


def readers_file(store: Path) -> Path:
    """The file on which every reader of a readers-only collector holds a shared lock."""
    return _journal(store) / "readers"


def is_last_reader(lock: int) -> bool:
    """Whether no other process holds `lock`, an open `readers_file`. If true, new readers wait until it is closed."""
    return try_lock(lock)


def _journal(store: Path) -> Path:
    return store.with_name(store.name + ".journal")


def _start_collector(store: Path, timeout_s: float) -> StoreAddress:
    """Starts a collector without telemetry, in a new session: it may outlive this process if others read."""
    command = [sys.executable, "-m", "trainspan_cli", "collector", "--for-readers", "--store", str(store)]
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(
            [*command, "--grpc", "off", "--http", "off", "--flight", "127.0.0.1:0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            start_new_session=True,
        )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            address = running_collector(store)
            if address and (address.pid == process.pid or not address.for_readers):
                return address  # or that of a regular collector that started first
            if process.poll() is not None:
                messages.seek(0)
                last = messages.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
                raise ProcessError(f"the collector for {store} exited with code {process.returncode}: {last[0]}")
            time.sleep(0.02)
        process.kill()
        process.wait()
        raise ProcessError(f"the collector for {store} was not ready after {timeout_s:.0f} s")


def _stop_collector(store: Path, address: StoreAddress, timeout_s: float = 30.0) -> None:
    """Stops the collector by signals, while it has the store open."""
    deadline = time.monotonic() + timeout_s
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not is_locked(lock_file(store)):
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(address.pid, number)
        while time.monotonic() < deadline and is_locked(lock_file(store)):
            time.sleep(0.02)
    with contextlib.suppress(ChildProcessError):  # another reader's child
        while time.monotonic() < deadline and os.waitpid(address.pid, os.WNOHANG)[0] == 0:
            time.sleep(0.02)

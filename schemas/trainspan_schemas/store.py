"""How a reader finds the store: `<store>.json` names the running collector; without one, a reader starts one for itself.

The Flight protocol: a ticket is JSON, `{"sql": "SELECT …"}` for a user's query or `{"read": name, "parameters": {…}}` for
a named read; `wait_ms` bounds the wait for the loader. The answer's schema metadata holds `watermark`, the highest `seq` loaded.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trainspan_schemas.endpoint import StoreEndpoint
from trainspan_schemas.errors import ProcessError, StoreError

__all__ = ["StoreAddress", "address_file", "open_store", "running_collector", "write_address"]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What a running collector says of itself; addresses are `HOST:PORT`, or None if that listener is off."""

    pid: int
    store: str
    grpc: str | None
    http: str | None
    flight: str
    tls: bool = False
    """Whether all of them are encrypted."""
    token: str | None = None
    """Where tokens are in use: one for readers of this file, made anew with each start."""

    @property
    def endpoint(self) -> StoreEndpoint:
        """Where to read; no certificate is checked, since this file belongs to its user alone."""
        scheme = "grpc+tls" if self.tls else "grpc"
        authorization = f"Bearer {self.token}" if self.token else None
        return StoreEndpoint(f"{scheme}://{self.flight}", authorization, verify=False)


def address_file(store: Path) -> Path:
    """`spans.duckdb` → `spans.duckdb.json`, mode 0600, written by the collector when it is ready, removed when it stops."""
    return store.with_name(store.name + ".json")


def write_address(address: StoreAddress) -> None:
    """Writes the address file atomically with mode 0600."""
    path = address_file(Path(address.store))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(address), file)
    temporary.replace(path)


def running_collector(store: Path) -> StoreAddress | None:
    """The collector that owns `store` now; None where the file is missing or its process is gone."""
    try:
        address = StoreAddress(**json.loads(address_file(store).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None
    try:
        os.kill(address.pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return address


@contextlib.contextmanager
def open_store(store: str, *, start_timeout_s: float = 60.0) -> Iterator[StoreEndpoint]:
    """Yields where to read a store, given by its path or as `grpc://HOST:PORT` or `grpc+tls://HOST:PORT`.

    A path without a running collector gets one for the block's duration. Raises StoreError where the path does not
    exist, ProcessError where the collector does not come up.
    """
    if store.startswith(("grpc://", "grpc+tls://")):
        yield StoreEndpoint.of_address(store, os.environ)
        return
    path = Path(store)
    if address := running_collector(path):
        yield address.endpoint
        return
    journal = path.with_name(path.name + ".journal")
    if not path.exists() and not journal.exists():
        raise StoreError(
            f"no store at {path}: start `trainspan collector` and run an agent first, or name one with --store"
        )
    command = [sys.executable, "-m", "trainspan_cli", "collector", "--store", str(path)]
    process = subprocess.Popen(
        [*command, "--grpc", "off", "--http", "off", "--flight", "127.0.0.1:0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield _wait_for_collector(path, process, start_timeout_s).endpoint
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_collector(store: Path, process: "subprocess.Popen[str]", timeout_s: float) -> StoreAddress:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        address = running_collector(store)
        if address and address.pid == process.pid:
            return address
        if process.poll() is not None:
            assert process.stderr is not None
            last = process.stderr.read().strip().splitlines()[-1:] or ["no message"]
            raise ProcessError(f"the collector for {store} ended with code {process.returncode}: {last[0]}")
        time.sleep(0.05)
    raise ProcessError(f"the collector for {store} was not ready after {timeout_s:.0f} s")

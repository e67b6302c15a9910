"""The collector and `trainspan view` as processes, and what an answer costs each of them."""

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.support.cpu_time import exact_cpu_s, peak_kib, processes
from trainspan_schemas.store.access import running_collector
from trainspan_schemas.store.roles import Role, token_of

__all__ = ["Asked", "Served", "collector", "viewer"]

_START_S: Final = 60.0
_OPENED: Final = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
"""Headers of a browser that opens a page."""
_WAITING: Final = b"data-waiting"
"""In the answer in place of a page that is being made."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one answer cost."""

    ms: float
    """From the request to the last byte of the first answer."""
    whole_ms: float
    """The same to the whole page, if the first answer says that it is being made."""
    viewer_cpu_ms: float
    collector_cpu_ms: float
    n_bytes: int
    body: bytes = b""


@dataclass(slots=True)
class Served:
    """A running viewer and its collector."""

    port: int
    token: str
    viewer: int
    """Process id."""
    collector: int

    def ask(self, path: str) -> Asked:
        """Requests a page as a browser does. Raises RuntimeError if the answer is not a page."""
        before = exact_cpu_s(self.viewer), exact_cpu_s(self.collector)
        began = time.monotonic()
        body = self._get(path, _OPENED)
        first_s = whole_s = time.monotonic() - began
        if _WAITING in body:
            self._get(path, {})
            body = self._get(path, _OPENED)
            whole_s = time.monotonic() - began
        cpu_s = exact_cpu_s(self.viewer) - before[0], exact_cpu_s(self.collector) - before[1]
        return Asked(1e3 * first_s, 1e3 * whole_s, 1e3 * cpu_s[0], 1e3 * cpu_s[1], len(body), body)

    def _get(self, path: str, headers: Mapping[str, str]) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}", **headers})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: HTTP {answer.status}: {body[-600:].decode(errors='replace')}")
        return body

    def peaks_mib(self) -> dict[str, int]:
        """Peak RSS of the viewer, and of the collector with its processes (pages that they share count twice)."""
        return {
            "viewer_peak_rss_mib": peak_kib(self.viewer) >> 10,
            "collector_peak_rss_mib": sum(map(peak_kib, processes(self.collector))) >> 10,
        }


@contextmanager
def collector(store: Path) -> Iterator[int]:
    """A collector for this store; its process id."""
    command = [sys.executable, "-m", "trainspan_cli", "collector", "--store", str(store)]
    process = subprocess.Popen(
        [*command, "--grpc", "127.0.0.1:0", "--http", "off", "--flight", "127.0.0.1:0"], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + _START_S
        while running_collector(store) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the collector did not start (exit code {process.poll()})")
            time.sleep(0.01)
        yield process.pid
    finally:
        process.terminate()
        process.wait(120)


@contextmanager
def viewer(home: Path, store: Path, collecting: int) -> Iterator[Served]:
    """`trainspan view` of a state folder and a store, which the process `collecting` holds."""
    command = [sys.executable, "-m", "trainspan_cli", "view", "--port", "0", "--store", str(store)]
    environ = {**os.environ, "TRAINSPAN_HOME": str(home)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the viewer did not start")
        port = int(line.partition("?")[0].rstrip("/").rpartition(":")[2])
        yield Served(port, token_of(home / "tokens.toml", Role.READER), process.pid, collecting)
    finally:
        process.terminate()
        process.wait(60)

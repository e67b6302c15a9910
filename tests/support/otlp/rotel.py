"""The Rust OpenTelemetry relay `rotel` (from PyPI) in front of a collector."""

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection

from tests.support.ports import free_ports


@dataclass(frozen=True, slots=True)
class Relay:
    """HOST:PORT of its listeners."""

    grpc: str
    http: str


def runs_here() -> bool:
    """Whether its wheels are for this machine: they need a newer glibc than all other packages."""
    libc, version = platform.libc_ver()
    return platform.machine() == "x86_64" and libc == "glibc" and [*map(int, version.split("."))] >= [2, 34]


def install(folder: Path) -> Path:
    """Puts the relay into a folder and returns its program."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "rotel==0.0.1a15"]
    subprocess.run(pip, check=True, timeout=240, capture_output=True)
    return folder / "rotel" / "rotel-agent"


@contextmanager
def relay_to(
    program: Path, endpoint: str, protocol: str, folder: Path, *, headers: str | None = None
) -> Iterator[Relay]:
    """Runs a relay within the block that exports to `endpoint` over `protocol` (grpc or http)."""
    grpc_port, http_port = free_ports(2)
    command = [
        *(str(program), "start", "--exporter", "otlp", "--batch-timeout", "50ms"),
        *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}", "--otlp-http-endpoint", f"127.0.0.1:{http_port}"),
        *("--otlp-exporter-endpoint", endpoint, "--otlp-exporter-protocol", protocol),
        *("--pid-file", str(folder / "rotel.pid"), "--log-file", str(folder / "rotel.log")),
    ]
    if headers:
        command += ["--otlp-exporter-custom-headers", headers]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr, cwd=folder)
    try:
        for port in (grpc_port, http_port):
            _wait_for(port, process)
        yield Relay(f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}")
    finally:
        process.terminate()
        process.wait(20)


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, f"rotel ended with {process.returncode}"
        try:
            with closing(create_connection(("127.0.0.1", port), 1)):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("rotel does not listen")

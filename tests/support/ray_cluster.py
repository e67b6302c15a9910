"""A real Ray cluster of processes on this machine: `ray start`, with a head and nodes that can be killed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tests.support.ports import free_ports

_BIN = Path(sys.executable).parent
_STORE_BYTES = 80 * 2**20
_START_S = 120.0


class RayCluster:
    """A head, on which the driver runs, and nodes that can be killed; each is a process group of its own.

    Agents find the name of their node in the variable NODE: `head`, `node-0` and so on.
    """

    def __init__(self, cpus: int) -> None:
        """`cpus` are those of the head."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of Unix sockets must be short
        # Workers start when they are needed, and a dead node is noticed soon.
        tuned = {
            "RAY_enable_worker_prestart": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "2",
            "RAY_worker_niceness": "0",
        }
        self._environ = {**os.environ, **tuned, "RAY_USAGE_STATS_ENABLED": "0"}
        port, client_port, dashboard_port = free_ports(3)
        self.address = f"127.0.0.1:{port}"
        self._head_options = [
            *("--head", f"--port={port}", f"--ray-client-server-port={client_port}", "--include-dashboard=false"),
            *(f"--dashboard-port={dashboard_port}", f"--num-cpus={cpus}", f"--temp-dir={self.folder}"),
        ]
        self._head: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.node_addresses: list[str] = []

    def __enter__(self) -> "RayCluster":
        self._head = self._start("head", *self._head_options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        processes = [*self.nodes, *([self._head] if self._head else [])]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add_node(self, cpus: int, *options: str) -> "subprocess.Popen[bytes]":
        (port,) = free_ports(1)
        common = (f"--address={self.address}", f"--num-cpus={cpus}", f"--node-manager-port={port}")
        node = self._start(f"node-{len(self.nodes)}", *common, *options)
        self.nodes.append(node)
        self.node_addresses.append(f"127.0.0.1:{port}")
        return node

    @staticmethod
    def kill(node: "subprocess.Popen[bytes]") -> None:
        """Kills all processes of a node at once, as the loss of its machine would, but not what agents have started."""
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def logs(self) -> str:
        """All that the cluster has written down."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return "\n".join(path.read_text(errors="replace") for path in files)

    def _start(self, name: str, *options: str) -> "subprocess.Popen[bytes]":
        common = ("--block", f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats", "--log-style=record")
        output = self.folder / f"{name}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [str(_BIN / "ray"), "start", *options, *common],
                env={**self._environ, "NODE": name},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in output.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                self.kill(process)
                raise RuntimeError(f"ray start {name}: {output.read_text()}")
            time.sleep(0.05)
        return process

"""The OTLP intake of agentlightning 0.3.0 with the same request bodies over HTTP: spans per CPU-second of its server.

It keeps spans in memory and answers before anything is on disk. Its 149 packages (about 800 MB) stay out of this project's
environment: `make bench` measures it if TRAINSPAN_BENCH_PEER_PYTHON names a Python with them, and so does
`python -m benchmarks.peers.agentlightning_intake`, which otherwise installs them into a temporary environment.
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support.cpu_time import cpu_s
from benchmarks.support.export_requests import SPANS_PER_REQUEST, requests

__all__ = ["PEER_PYTHON", "measure"]

PEER_PYTHON = "TRAINSPAN_BENCH_PEER_PYTHON"
_PACKAGE = "agentlightning==0.3.0"
_INSTALL_S = 900
_SECONDS = 10.0
_CONNECTIONS = 4
_SERVER = """
import asyncio, json, socket, sys
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore

async def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = LightningStoreServer(InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=port)
    await server.start()
    rollout = await server.start_rollout(input={"task": 1})
    print(json.dumps({"port": port, "rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    spans = await server.query_spans(rollout.rollout_id)
    print(json.dumps({"stored": len(spans)}), flush=True)
    await server.stop()

asyncio.run(main())
"""


def measure(python: Path, seconds: float = _SECONDS) -> dict[str, Any]:
    """Figures of the server run by `python`, under load from four connections for `seconds`."""
    with _server(python) as (process, said):
        ids = {
            f"agentlightning.{name}": said[name] for name in ("rollout_id", "attempt_id")
        }  # it drops spans without them
        taken: list[float] = []
        bodies = [requests(seed, ids) for seed in range(_CONNECTIONS)]
        for sender in bodies:
            next(sender)  # creates its spans
        cpu_before, began = cpu_s(process.pid), time.monotonic()
        senders = [threading.Thread(target=_send, args=(said["port"], began + seconds, body, taken)) for body in bodies]
        for thread in senders:
            thread.start()
        for thread in senders:
            thread.join()
        took_s, used_s = time.monotonic() - began, cpu_s(process.pid) - cpu_before
        stored = _ask(process, "\n")["stored"]
    n_spans = len(taken) * SPANS_PER_REQUEST
    return {
        "peer_spans_per_s": round(n_spans / took_s),
        "peer_spans_per_cpu_s": round(n_spans / used_s),
        "peer_spans_stored_of_sent": f"{stored} of {n_spans}",
    }


@contextmanager
def _server(python: Path) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            [python, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True
        )
        try:
            yield process, _ask(process)
        except (ValueError, KeyError) as error:
            messages.seek(0)
            raise RuntimeError(f"the peer's server failed: {messages.read()[-500:]}") from error
        finally:
            process.kill()
            process.wait()


def _ask(process: "subprocess.Popen[str]", line: str = "") -> dict[str, Any]:
    """Writes a line; returns the next line of JSON."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    while not (answer := process.stdout.readline()).startswith("{"):
        if not answer:
            raise ValueError("the server ended")
    said: dict[str, Any] = json.loads(answer)
    return said


def _send(port: int, stop_at: float, bodies: Iterator[bytes], taken: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/x-protobuf"}
    while (began := time.monotonic()) < stop_at:
        connection.request("POST", "/v1/traces", next(bodies), headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the peer answered {answer.status}")
        taken.append(time.monotonic() - began)
    connection.close()


def main() -> int:
    if present := os.environ.get(PEER_PYTHON):
        print(json.dumps(measure(Path(present)), indent=2))
        return 0
    with tempfile.TemporaryDirectory(prefix="trainspan-peer-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", _PACKAGE], check=True, timeout=_INSTALL_S)
        print(json.dumps(measure(python), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

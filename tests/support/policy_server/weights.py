"""`trainspan weights` as a process, and a connection to it that breaks."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["breaking_connection", "weights_server"]


@contextlib.contextmanager
def weights_server(checkpoints: Path, home: Path, port: int = 0) -> Iterator[str]:
    """Serves a folder of checkpoints with the token of `home`; yields the URL."""
    command = [sys.executable, "-m", "trainspan_cli", "weights", "--checkpoints", str(checkpoints)]
    process = subprocess.Popen(
        [*command, "--weights-port", str(port), "--format", "json"],
        env={**os.environ, "TRAINSPAN_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        process.stdout.close()


@contextlib.contextmanager
def breaking_connection(url: str, cut_after: list[int]) -> Iterator[tuple[str, list[int]]]:
    """A relay to `url` that closes its connections after that many bytes of the answers, one after the other; later ones stay.

    Yields its URL, and the bytes that each connection passed on.
    """
    host, _, port = url.removeprefix("http://").rpartition(":")
    passed: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay(client: socket.socket, number: int) -> None:
            most = cut_after[number] if number < len(cut_after) else sys.maxsize
            with client, socket.create_connection((host, int(port))) as server:
                server.sendall(client.recv(2**16))
                client.settimeout(20)
                while passed[number] < most and (chunk := server.recv(2**14)):
                    passed[number] += len(chunk)
                    client.sendall(chunk)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    passed.append(0)
                    threading.Thread(target=_quiet(relay), args=(client, len(passed) - 1), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", passed
        listener.shutdown(socket.SHUT_RDWR)


def _quiet(relay: "object") -> "object":
    def run(*args: object) -> None:
        with contextlib.suppress(OSError):
            relay(*args)  # type: ignore[operator]

    return run

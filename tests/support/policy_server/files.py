"""A server of plain files, such as a trainer's machine may have for its checkpoints, and a connection to it that breaks."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["breaking_connection", "file_server"]


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def file_server(folder: Path, port: int = 0) -> Iterator[str]:
    """Serves a folder as `python -m http.server` does; yields the URL."""
    http = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(folder)))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


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

"""A policy server of another vendor: vLLM's own answers, through a proxy that removes what our server adds and reads."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OURS = {"traceparent", "tracestate", "baggage", "host", "content-length", "connection", "accept-encoding"}


@dataclass
class BareServer:
    """`refuse` answers 400 to a request with a parameter that OpenAI's own server does not support."""

    url: str = ""
    refuse: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """The requests, in order of arrival."""


@contextmanager
def bare_server(upstream: str) -> Iterator[BareServer]:
    """Forwards to `upstream`, a URL without `/v1`."""
    server = BareServer()
    address = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            body = json.loads(content)
            server.bodies.append(body)
            if server.refuse and "return_token_ids" in body:
                self._answer(400, [], b'{"error": {"message": "Unrecognized request argument: return_token_ids"}}')
                return
            connection = http.client.HTTPConnection(address, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OURS}
            connection.request("POST", self.path, content, headers)
            answer = connection.getresponse()
            if "event-stream" not in (answer.headers["content-type"] or ""):
                self._answer(answer.status, [("content-type", answer.headers["content-type"])], answer.read())
                return
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # the client may leave early
                while data := answer.read1(37):  # cut anywhere
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")
            connection.close()

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response(status)
            for name, value in [*headers, ("content-length", str(len(content)))]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
    server.url = f"http://127.0.0.1:{listener.server_port}"
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()

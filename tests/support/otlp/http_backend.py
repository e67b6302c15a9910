"""A backend of another vendor, which takes OTLP/HTTP and keeps the names of spans."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["HttpBackend"]


class HttpBackend:
    """`with HttpBackend() as backend:` takes OTLP/HTTP under any path."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str, str]] = []
        """Trace id, span id and name of each span."""
        self.bodies: list[tuple[str, bytes]] = []
        """Path and body of each request, in order of arrival."""
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.whole_body()
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                backend.bodies.append((self.path, body))
                if "traces" in self.path:
                    backend.take(body)
                self.answer()

            def whole_body(self) -> bytes:
                """Node sends its bodies in chunks (RFC 9112, section 7.1)."""
                if length := self.headers["Content-Length"]:
                    return self.rfile.read(int(length))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                body = b'{"project_name": "agent", "project_url": "http://backend"}'
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> "HttpBackend":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.received += [(span.trace_id.hex(), span.span_id.hex(), span.name) for span in scope.spans]

    @property
    def spans(self) -> dict[str, set[str]]:
        """Trace id → names."""
        names: dict[str, set[str]] = {}
        for trace_id, _, name in self.received:
            names.setdefault(trace_id, set()).add(name)
        return names

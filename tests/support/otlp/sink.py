"""A small real OTLP/gRPC server that records the spans it receives."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span with plain values; ids as lower-case hex."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    """(trace id, span id) of each link."""
    events: list[tuple[str, int, dict[str, Any]]]
    """(name, time, attributes) of each event."""
    error: str
    """The message of its status."""


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Records spans, in order of arrival; `refusals` are answered first, one per request, each with `trailers`."""

    def __init__(self) -> None:
        self.refusals: list[grpc.StatusCode] = []
        self.max_bytes: int | None = None
        """Longer requests are refused."""
        self.trailers: tuple[tuple[str, bytes], ...] = ()
        self._spans: list[ReceivedSpan] = []
        self._arrived = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        if self.refusals:
            context.set_trailing_metadata(self.trailers)
            context.abort(self.refusals.pop(0), "refused")
        if self.max_bytes is not None and request.ByteSize() > self.max_bytes:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too long")
        received = [
            _received(span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans += received
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, matching: Callable[[ReceivedSpan], bool] = lambda span: True) -> list[ReceivedSpan]:
        with self._arrived:
            return [span for span in self._spans if matching(span)]

    def wait(
        self, count: int, matching: Callable[[ReceivedSpan], bool] = lambda span: True, timeout_s: float = 10.0
    ) -> list[ReceivedSpan]:
        """Waits for at least `count` matching spans and returns them. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while len(found := [span for span in self._spans if matching(span)]) < count:
                if not self._arrived.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"{len(found)} of {count} spans after {timeout_s} s")
            return found


@contextlib.contextmanager
def otlp_sink(port: int = 0) -> Iterator[tuple[OtlpSink, str]]:
    """Yields a running sink and its URL."""
    sink = OtlpSink()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield sink, f"http://127.0.0.1:{bound}"
    finally:
        server.stop(0).wait()


def _received(span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        name=span.name,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=span.status.code,
        attributes={pair.key: _plain(pair.value) for pair in span.attributes},
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        events=[
            (event.name, event.time_unix_nano, {pair.key: _plain(pair.value) for pair in event.attributes})
            for event in span.events
        ],
        error=span.status.message,
    )


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None

"""A real OTLP/gRPC server that records spans with their events, links and service, and log records."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """One received span; ids as lower-case hex."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[str]
    error: bool
    message: str
    """Of its status."""
    service: str


@dataclass(frozen=True, slots=True)
class RecordedLog:
    """One received log record."""

    event_name: str
    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass
class OtlpRecorder:
    """`with OtlpRecorder() as recorder:` listens on `port`, by default a free one."""

    spans: list[RecordedSpan] = field(default_factory=list)
    logs: list[RecordedLog] = field(default_factory=list)
    port: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> "OtlpRecorder":
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, condition: Callable[["OtlpRecorder"], bool], timeout_s: float = 10.0) -> None:
        """Waits until `condition(self)` holds; the test's next assertion shows what is missing."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not condition(self) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def named(self, name: str) -> list[RecordedSpan]:
        """Returns the spans of that name, in order of arrival."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> RecordedSpan:
        """Returns the only span of that name."""
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans named {name!r} among {[span.name for span in self.spans]}"
        return found[0]

    def add(self, spans: list[RecordedSpan], logs: list[RecordedLog]) -> None:
        with self._changed:
            self.spans += spans
            self.logs += logs
            self._changed.notify_all()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, recorder: OtlpRecorder) -> None:
        self._recorder = recorder

    def Export(self, request: Any, context: Any) -> Any:
        spans = [
            RecordedSpan(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                _attributes(span.attributes),
                [(event.name, _attributes(event.attributes)) for event in span.events],
                [link.trace_id.hex() for link in span.links],
                span.status.code == 2,
                span.status.message,
                str(_attributes(resource.resource.attributes).get("service.name")),
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self._recorder.add(spans, [])
        return trace_service_pb2.ExportTraceServiceResponse()


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, recorder: OtlpRecorder) -> None:
        self._recorder = recorder

    def Export(self, request: Any, context: Any) -> Any:
        logs = [
            _log(record)
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]
        self._recorder.add([], logs)
        return logs_service_pb2.ExportLogsServiceResponse()


def _log(record: Any) -> RecordedLog:
    """Reads a log record; OpenTelemetry for Python up to 1.34 sends the event's name as an attribute."""
    attributes = _attributes(record.attributes)
    name = attributes.pop("event.name", record.event_name)
    return RecordedLog(name, record.trace_id.hex(), record.span_id.hex(), attributes)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None

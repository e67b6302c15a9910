"""The contents of OTLP export requests, and which of their items cannot be stored."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Rejections", "id_problem", "log_records"]

_ZERO_TRACE = bytes(16)
_ZERO_SPAN = bytes(8)
_NAMED = 5


@dataclass(slots=True)
class Rejections:
    """The items of a request that cannot be stored: OTLP's partial success."""

    n_total: int = 0
    n_rejected: int = 0
    _named: list[str] = field(default_factory=list)

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Goes through the request's spans."""
        for span in _spans(request):
            self.n_total += 1
            if problem := id_problem(span):
                self.n_rejected += 1
                if len(self._named) < _NAMED:
                    ids = f"{span.trace_id.hex()[:40]}/{span.span_id.hex()[:40]}"
                    self._named.append(f"{span.name[:80]!r} ({ids}): {problem}")

    @property
    def message(self) -> str:
        """Names the first few; empty if there are none."""
        if not self.n_rejected:
            return ""
        n_more = self.n_rejected - len(self._named)
        more = f"; and {n_more} more" if n_more else ""
        return f"{self.n_rejected} spans rejected: {'; '.join(self._named)}{more}"


def id_problem(span: Span) -> str | None:
    """Why a span's ids are invalid; None if they are valid."""
    trace_id, span_id = span.trace_id, span.span_id
    if len(trace_id) != 16:
        return f"trace id has {len(trace_id)} bytes, not 16"
    if len(span_id) != 8:
        return f"span id has {len(span_id)} bytes, not 8"
    if trace_id == _ZERO_TRACE:
        return "trace id is all zeros"
    if span_id == _ZERO_SPAN:
        return "span id is all zeros"
    return None


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            yield from scope_spans.spans


def log_records(request: ExportLogsServiceRequest) -> Iterator[LogRecord]:
    for resource_logs in request.resource_logs:
        for scope_logs in resource_logs.scope_logs:
            yield from scope_logs.log_records

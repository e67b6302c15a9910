"""What OTLP export requests hold, and which of their spans cannot be stored."""

from collections.abc import Iterator
from dataclasses import dataclass

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Rejection", "id_problem", "log_records", "rejected_spans"]

_ZERO_TRACE = bytes(16)
_ZERO_SPAN = bytes(8)
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Rejection:
    """What of a request cannot be stored: OTLP's partial success."""

    n_total: int
    n_rejected: int
    message: str
    """Names the first few; empty if there is none."""


def id_problem(span: Span) -> str | None:
    """Why a span's ids make it no span; None for a valid one."""
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


def rejected_spans(request: ExportTraceServiceRequest) -> Rejection:
    n_total = n_rejected = 0
    named: list[str] = []
    for span in _spans(request):
        n_total += 1
        if problem := id_problem(span):
            n_rejected += 1
            if len(named) < _NAMED:
                named.append(f"{span.name[:80]!r} ({span.trace_id.hex()[:40]}/{span.span_id.hex()[:40]}): {problem}")
    if not n_rejected:
        return Rejection(n_total, 0, "")
    more = f"; and {n_rejected - len(named)} more" if n_rejected > len(named) else ""
    return Rejection(n_total, n_rejected, f"{n_rejected} spans rejected: {'; '.join(named)}{more}")


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            yield from scope_spans.spans


def log_records(request: ExportLogsServiceRequest) -> Iterator[LogRecord]:
    for resource_logs in request.resource_logs:
        for scope_logs in resource_logs.scope_logs:
            yield from scope_logs.log_records

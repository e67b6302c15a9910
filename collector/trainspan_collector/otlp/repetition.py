"""What a request becomes as rows: each has a copy of its resource and scope, and a span's evaluations each of its rollout id."""

from collections.abc import Iterator
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from trainspan_collector.otlp.byte_search import BytePatterns
from trainspan_schemas.telemetry import keys

__all__ = ["items_by_scope", "repeated_bytes"]

_RESULTS: Final = BytePatterns([b".evaluation.", b".annotation."], literal=True)
"""A request with evaluations on spans contains one of these."""
_FEEDBACK: Final = (".evaluation.name", ".annotation.name")


def items_by_scope(request: Any) -> Iterator[tuple[int, Any]]:
    """The bytes of each resource and scope together, and their spans or log records."""
    kind: Any = type(request)
    of_logs = kind is ExportLogsServiceRequest
    for group in request.resource_logs if of_logs else request.resource_spans:
        resource_bytes = group.resource.ByteSize() + _size(group.schema_url)
        for scope in group.scope_logs if of_logs else group.scope_spans:
            shared_bytes = resource_bytes + scope.scope.ByteSize() + _size(scope.schema_url)
            yield shared_bytes, scope.log_records if of_logs else scope.spans


def repeated_bytes(request: Any, body: bytes) -> int:
    """The bytes that the rows of a request inherit, all copies together; `request` was parsed from `body`.

    A scope without items counts too: its resource is read for it.
    """
    n_bytes = sum(shared_bytes * max(1, len(items)) for shared_bytes, items in items_by_scope(request))
    if isinstance(request, ExportLogsServiceRequest) or body not in _RESULTS:
        return n_bytes
    return n_bytes + sum(_of_evaluations(span) for _, spans in items_by_scope(request) for span in spans)


def _of_evaluations(span: Span) -> int:
    """The bytes of a span's rollout id, for each evaluation among its events and feedback."""
    n_results: int = sum(event.name == keys.EVALUATION_EVENT for event in span.events)
    rollout_bytes = 0
    for pair in span.attributes:
        n_results += pair.key.endswith(_FEEDBACK)
        if pair.key == keys.ROLLOUT_ID:
            rollout_bytes = _size(pair.value.string_value)
    return n_results * rollout_bytes


def _size(text: str) -> int:
    return len(text.encode())

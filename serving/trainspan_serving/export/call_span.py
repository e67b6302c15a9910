"""Call spans as OTLP protobuf.

Encoded directly rather than through the SDK: capture needs no sampler, context or span limits, but exact counts of the
spans that were and were not sent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from trainspan_schemas.telemetry.identity import TraceParent

__all__ = ["AttributeValue", "CallSpan", "encode_attributes", "encode_request"]

AttributeValue: TypeAlias = str | bool | int | float | bytes | Sequence[str]

_SAMPLED = 0x1
_HAS_IS_REMOTE = 0x100
_IS_REMOTE = 0x200


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A finished call; ids as lower-case hex, times in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    error: str | None = None
    link: TraceParent | None = None
    """A related span of another trace."""
    is_sampled: bool = True
    """Whether the caller's `traceparent` says that its own spans are recorded."""

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory and on the wire."""
        return 1024 + sum(len(value) for value in self.attributes.values() if isinstance(value, bytes | str))


def encode_request(spans: Iterable[CallSpan], resource: Mapping[str, AttributeValue]) -> ExportTraceServiceRequest:
    """Returns one export request with all `spans` under one resource."""
    scope_spans = ScopeSpans(
        scope=InstrumentationScope(name="trainspan.serving"), spans=[_encode_span(span) for span in spans]
    )
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(resource=Resource(attributes=encode_attributes(resource)), scope_spans=[scope_spans])
        ]
    )


def _encode_span(span: CallSpan) -> Span:
    link = span.link
    return Span(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_span_id or ""),
        name=span.name,
        kind=Span.SpanKind.SPAN_KIND_SERVER,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=encode_attributes(span.attributes),
        status=Status(code=Status.StatusCode.STATUS_CODE_ERROR, message=span.error) if span.error else Status(),
        links=[Span.Link(trace_id=bytes.fromhex(link.trace_id), span_id=bytes.fromhex(link.span_id))] if link else [],
        flags=(_SAMPLED if span.is_sampled else 0) | _HAS_IS_REMOTE | (_IS_REMOTE if span.parent_span_id else 0),
    )


def encode_attributes(attributes: Mapping[str, AttributeValue]) -> list[KeyValue]:
    """Encodes each value with the OTLP type that matches its Python type."""
    return [KeyValue(key=key, value=_encode_value(value)) for key, value in attributes.items()]


def _encode_value(value: AttributeValue) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    return AnyValue(array_value=ArrayValue(values=[_encode_value(item) for item in value]))

"""OTLP: protobuf and JSON, as the OpenTelemetry Collector's file exporter and Tempo write it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from trainspan_importers.account import Account
from trainspan_importers.otlp_json import json_items, members
from trainspan_importers.reading import Converted, Format, Reader, each
from trainspan_importers.traces import Item, Origin
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["OTLP", "TEMPO"]

_TRACE_NAMES = ("resourceSpans", "resource_spans", "batches")
_LOG_NAMES = ("resourceLogs", "resource_logs")
_METRIC_NAMES = ("resourceMetrics", "resource_metrics")


class _OtlpReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account

    def add(self, value: Any) -> Iterator[Converted]:
        if isinstance(value, bytes):
            yield from _of_protobuf(value, self._account)
            return
        value = value.get("trace", value) if isinstance(value, dict) else value
        if not isinstance(value, dict):
            raise InvalidRecordError("no object with resourceSpans")
        for name in (*_TRACE_NAMES, *_LOG_NAMES):
            yield from each(members(value, name) if name in value else (), json_items)
        for name in _METRIC_NAMES:
            groups = members(value, name) if name in value else ()
            scopes = [scope for group in groups for scope in members(group, "scopeMetrics")]
            self._account.leave_out("metrics", n_parts=sum(len(members(scope, "metrics")) for scope in scopes))


@dataclass(frozen=True, slots=True)
class _Signal:
    """A kind of message; those of all kinds have resources, scopes and items under the same field numbers."""

    kind: type[TracesData | LogsData | MetricsData]
    groups: str
    scopes: str
    items: str
    is_one: Callable[[Any], bool]
    """Whether an item has one of the fields that hardly any of its kind lacks and that no item of another kind can have."""

    def items_of(self, body: bytes) -> list[Item] | None:
        """The items of a message; None if it has none that is of this kind."""
        from google.protobuf.message import DecodeError

        try:
            groups = getattr(self.kind.FromString(body), self.groups)
        except DecodeError:
            return None
        items = [
            Item(item, Origin(outer.resource, inner.scope, outer.schema_url, inner.schema_url))
            for outer in groups
            for inner in getattr(outer, self.scopes)
            for item in getattr(inner, self.items)
        ]
        return items if any(self.is_one(item.message) for item in items) else None


_SPANS: Final = _Signal(
    *(TracesData, "resource_spans", "scope_spans", "spans"),
    lambda span: bool(span.start_time_unix_nano or span.end_time_unix_nano),
)
_LOG_RECORDS: Final = _Signal(
    *(LogsData, "resource_logs", "scope_logs", "log_records"),
    lambda record: bool(record.time_unix_nano or record.observed_time_unix_nano or record.severity_number),
)
_METRICS: Final = _Signal(
    *(MetricsData, "resource_metrics", "scope_metrics", "metrics"),
    lambda metric: metric.WhichOneof("data") is not None,
)


def _of_protobuf(body: bytes, account: Account) -> Iterator[Converted]:
    for signal in (_SPANS, _LOG_RECORDS):
        if (items := signal.items_of(body)) is not None:
            yield from (_fault_in_ids(item.message) or item for item in items)
            return
    metrics = _METRICS.items_of(body)
    if metrics is None:
        raise InvalidRecordError(f"{len(body)} bytes that are neither spans nor log records of OTLP")
    account.leave_out("metrics", n_parts=len(metrics))


def _fault_in_ids(message: Span | LogRecord) -> InvalidRecordError | None:
    """What is wrong with the ids; those of a log record and a parent's may be missing."""
    may_lack = isinstance(message, LogRecord)
    for name, n_bytes in (("trace_id", 16), ("span_id", 8), ("parent_span_id", 8)):
        value: bytes = getattr(message, name, b"")
        if not value and (may_lack or name == "parent_span_id"):
            continue
        if len(value) != n_bytes or not any(value):
            return InvalidRecordError(f"{name} is {value[:20].hex()!r}")
    return None


def _is_otlp(value: Any) -> bool:
    return isinstance(value, bytes) or (
        isinstance(value, dict)
        and any(isinstance(value.get(name), list) for name in (*_TRACE_NAMES[:2], *_LOG_NAMES, *_METRIC_NAMES))
    )


def _is_tempo(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    trace = value.get("trace")
    return isinstance(value.get("batches"), list) or (isinstance(trace, dict) and _is_otlp(trace))


OTLP = Format("otlp", "OTLP", _is_otlp, _OtlpReader, has_identities=True)
TEMPO = Format("tempo", "Tempo", _is_tempo, _OtlpReader, has_identities=True)

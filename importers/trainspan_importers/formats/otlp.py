"""OTLP: protobuf and JSON, as the OpenTelemetry Collector's file exporter and Tempo write it."""

from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from trainspan_importers.account import Account
from trainspan_importers.otlp_json import json_items, members
from trainspan_importers.reading import Converted, Format, Reader
from trainspan_importers.traces import Item, Origin
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["OTLP", "TEMPO"]

_TRACES = ("resourceSpans", "resource_spans", "batches")
_LOGS = ("resourceLogs", "resource_logs")
_METRICS = ("resourceMetrics", "resource_metrics")


class _OtlpReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account

    def add(self, value: Any) -> Iterator[Converted]:
        if isinstance(value, bytes):
            yield from _of_protobuf(value)
            return
        value = value.get("trace", value) if isinstance(value, dict) else value
        if not isinstance(value, dict):
            raise InvalidRecordError("no object with resourceSpans")
        for name in (*_TRACES, *_LOGS):
            for resource_item in members(value, name) if name in value else ():
                yield from json_items(resource_item)
        for name in _METRICS:
            self._account.leave_out("metrics", n_parts=len(members(value, name)) if name in value else 0)


def _of_protobuf(body: bytes) -> Iterator[Converted]:
    """The spans of a message; log records have the same place in theirs, so the fields tell which of them it is."""
    from google.protobuf.message import DecodeError

    try:
        traces = TracesData.FromString(body)
        spans = [span for outer in traces.resource_spans for inner in outer.scope_spans for span in inner.spans]
        if all(len(span.trace_id) == 16 and len(span.span_id) == 8 for span in spans):
            for outer in traces.resource_spans:
                for inner in outer.scope_spans:
                    origin = Origin(outer.resource, inner.scope, outer.schema_url, inner.schema_url)
                    yield from (Item(span, origin) for span in inner.spans)
            return
    except DecodeError:
        pass
    try:
        logs = LogsData.FromString(body)
    except DecodeError as error:
        raise InvalidRecordError(f"{len(body)} bytes that are neither spans nor log records of OTLP") from error
    for outer_log in logs.resource_logs:
        for inner_log in outer_log.scope_logs:
            origin = Origin(outer_log.resource, inner_log.scope, outer_log.schema_url, inner_log.schema_url)
            yield from (Item(record, origin) for record in inner_log.log_records)


def _is_otlp(value: Any) -> bool:
    return isinstance(value, bytes) or (
        isinstance(value, dict) and any(isinstance(value.get(name), list) for name in (*_TRACES[:2], *_LOGS, *_METRICS))
    )


def _is_tempo(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    trace = value.get("trace")
    return isinstance(value.get("batches"), list) or (isinstance(trace, dict) and _is_otlp(trace))


OTLP = Format("otlp", "OTLP", _is_otlp, _OtlpReader, has_identities=True)
TEMPO = Format("tempo", "Tempo", _is_tempo, _OtlpReader, has_identities=True)

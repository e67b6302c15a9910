"""OTLP/JSON as protobuf messages: resource spans and resource logs, also as Tempo and Phoenix write them.

Ids are hex, or base64 of the right length; enumerations are numbers or names; 64-bit numbers are texts or numbers; unknown
members are ignored. Spec: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.
"""

import functools
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from trainspan_importers.reading import Converted, each
from trainspan_importers.traces import Item, Origin
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["Members", "json_items", "members", "span_of"]

Members = Mapping[str, Any]

_KINDS: Final = {
    name: number for number, name in enumerate(("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"))
}
_CODES: Final = {"UNSET": 0, "OK": 1, "ERROR": 2}


def json_items(resource_item: Members) -> Iterator[Converted]:
    """The spans and log records of one member of `resourceSpans` or `resourceLogs`; an error for each that is none."""
    resource = Resource(attributes=_pairs(_member(resource_item.get("resource") or {}, "attributes")))
    schema = str(_member(resource_item, "schemaUrl") or "")

    def scope_items(scope_item: Members, name: str, read: Callable[[Members], Span | LogRecord]) -> Iterator[Converted]:
        origin = Origin(resource, _scope(scope_item), schema, str(_member(scope_item, "schemaUrl") or ""))
        return each(members(scope_item, name), lambda item: iter([Item(read(item), origin)]))

    for name, inner, read in (
        ("scopeSpans", "spans", span_of),
        ("instrumentationLibrarySpans", "spans", span_of),
        ("scopeLogs", "logRecords", _log_of),
    ):
        yield from each(members(resource_item, name), functools.partial(scope_items, name=inner, read=read))


def members(parent: Members, name: str) -> list[Members]:
    """The objects in a list."""
    items = _member(parent, name) or []
    if not isinstance(items, list):
        raise InvalidRecordError(f"{name} is no list")
    return [item for item in items if isinstance(item, dict)]


def span_of(item: Members) -> Span:
    """A span. Raises one of SHAPE_ERRORS if it is none."""
    status = item.get("status") or {}
    return Span(
        trace_id=_id(_member(item, "traceId"), 16, "traceId"),
        span_id=_id(_member(item, "spanId"), 8, "spanId"),
        parent_span_id=_id(_member(item, "parentSpanId") or "", 8, "parentSpanId", may_lack=True),
        trace_state=str(_member(item, "traceState") or ""),
        flags=_int(item.get("flags")),
        name=str(item.get("name") or ""),
        kind=_enumerated(item.get("kind"), _KINDS, "SPAN_KIND_"),  # type: ignore[arg-type]
        start_time_unix_nano=_int(_member(item, "startTimeUnixNano")),
        end_time_unix_nano=_int(_member(item, "endTimeUnixNano")),
        attributes=_pairs(item.get("attributes")),
        dropped_attributes_count=_int(_member(item, "droppedAttributesCount")),
        events=[_event(event) for event in members(item, "events")],
        dropped_events_count=_int(_member(item, "droppedEventsCount")),
        links=[_link(link) for link in members(item, "links")],
        dropped_links_count=_int(_member(item, "droppedLinksCount")),
        status=Status(
            code=_enumerated(status.get("code"), _CODES, "STATUS_CODE_"),  # type: ignore[arg-type]
            message=str(status.get("message") or ""),
        ),
    )


def _event(item: Members) -> Span.Event:
    return Span.Event(
        time_unix_nano=_int(_member(item, "timeUnixNano")),
        name=str(item.get("name") or ""),
        attributes=_pairs(item.get("attributes")),
        dropped_attributes_count=_int(_member(item, "droppedAttributesCount")),
    )


def _link(item: Members) -> Span.Link:
    return Span.Link(
        trace_id=_id(_member(item, "traceId"), 16, "traceId"),
        span_id=_id(_member(item, "spanId"), 8, "spanId"),
        trace_state=str(_member(item, "traceState") or ""),
        attributes=_pairs(item.get("attributes")),
        dropped_attributes_count=_int(_member(item, "droppedAttributesCount")),
        flags=_int(item.get("flags")),
    )


def _log_of(item: Members) -> LogRecord:
    record = LogRecord(
        time_unix_nano=_int(_member(item, "timeUnixNano")),
        observed_time_unix_nano=_int(_member(item, "observedTimeUnixNano")),
        severity_number=_int(_member(item, "severityNumber")),  # type: ignore[arg-type]
        severity_text=str(_member(item, "severityText") or ""),
        body=_any_value(item["body"]) if isinstance(item.get("body"), dict) else None,
        attributes=_pairs(item.get("attributes")),
        dropped_attributes_count=_int(_member(item, "droppedAttributesCount")),
        flags=_int(item.get("flags")),
        trace_id=_id(_member(item, "traceId") or "", 16, "traceId", may_lack=True),
        span_id=_id(_member(item, "spanId") or "", 8, "spanId", may_lack=True),
    )
    if name := _member(item, "eventName"):  # a field that old releases of the protocol's package lack
        record.attributes.append(KeyValue(key="event.name", value=AnyValue(string_value=str(name))))
    return record


def _scope(scope_item: Members) -> InstrumentationScope | None:
    scope = scope_item.get("scope") or _member(scope_item, "instrumentationLibrary")
    if not isinstance(scope, dict):
        return None
    return InstrumentationScope(
        name=str(scope.get("name") or ""),
        version=str(scope.get("version") or ""),
        attributes=_pairs(scope.get("attributes")),
        dropped_attributes_count=_int(_member(scope, "droppedAttributesCount")),
    )


def _member(parent: Members, name: str) -> Any:
    """A member by its name in lowerCamelCase, or by that of the protocol."""
    value = parent.get(name)
    return parent.get(_protocol_name(name)) if value is None else value


@functools.cache
def _protocol_name(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _pairs(items: Any) -> list[KeyValue]:
    return [KeyValue(key=item["key"], value=_any_value(item.get("value") or {})) for item in items or ()]


def _any_value(value: Members) -> AnyValue:
    for name, item in value.items():
        if item is None:  # Phoenix writes the members of all other kinds, too
            continue
        match name:
            case "stringValue" | "string_value":
                return AnyValue(string_value=item)
            case "intValue" | "int_value":
                return AnyValue(int_value=int(item))
            case "boolValue" | "bool_value":
                return AnyValue(bool_value=item)
            case "doubleValue" | "double_value":
                return AnyValue(double_value=float(item))
            case "arrayValue" | "array_value":
                return AnyValue(
                    array_value=ArrayValue(values=[_any_value(element) for element in item.get("values") or ()])
                )
            case "kvlistValue" | "kvlist_value":
                return AnyValue(kvlist_value=KeyValueList(values=_pairs(item.get("values"))))
            case "bytesValue" | "bytes_value":
                return AnyValue(bytes_value=b64decode(item, validate=True))
    return AnyValue()


def _id(value: Any, n_bytes: int, name: str, *, may_lack: bool = False) -> bytes:
    if not value and may_lack:
        return b""
    text = str(value)
    try:
        id_bytes = bytes.fromhex(text) if len(text) == 2 * n_bytes else b64decode(text, validate=True)
    except ValueError:
        id_bytes = b""
    if len(id_bytes) != n_bytes or not any(id_bytes):
        if may_lack and id_bytes and not any(id_bytes):
            return b""
        raise InvalidRecordError(f"{name} is {text[:40]!r}")
    return id_bytes


def _int(value: Any) -> int:
    return int(value or 0)


def _enumerated(value: Any, names: Mapping[str, int], prefix: str) -> int:
    if isinstance(value, str) and not value.isdecimal():
        return names.get(value.removeprefix(prefix).upper(), 0)
    return _int(value)

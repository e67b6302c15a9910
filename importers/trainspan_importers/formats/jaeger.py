"""Jaeger: the JSON of its API and of its user interface, `{"data": [trace, …]}`.

Schema: https://www.jaegertracing.io/docs/latest/apis/ (spans with references, tags and logs; times in microseconds). Attributes
of OpenTelemetry are tags, and its events are logs.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any, Final

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from trainspan_importers.account import Account
from trainspan_importers.reading import Converted, Format, Reader
from trainspan_importers.traces import SHAPE_ERRORS, Item, Origin, fault_of, key_values
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject

__all__ = ["JAEGER"]

_KINDS: Final = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_SCOPES: Final = ("otel.scope.name", "otel.library.name")
_SCOPE_VERSIONS: Final = ("otel.scope.version", "otel.library.version")
_OWN_TAGS: Final = (
    *("span.kind", "otel.status_code", "otel.status_description", "internal.span.format", "w3c.tracestate"),
    *(*_SCOPES, *_SCOPE_VERSIONS),
)


class _JaegerReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account

    def add(self, value: Any) -> Iterator[Converted]:
        traces = value.get("data", [value]) if isinstance(value, dict) else None
        if not isinstance(traces, list):
            raise InvalidRecordError("no object with traces in `data`")
        for trace in traces:
            if _is_trace(trace):
                yield from _trace_items(trace)
            elif not (isinstance(trace, dict) and trace.keys() <= {"total", "limit", "offset", "errors"}):
                raise InvalidRecordError("no trace with spans")


def _trace_items(trace: Mapping[str, Any]) -> Iterator[Converted]:
    origins: dict[tuple[str, str, str], Origin] = {}
    processes = trace.get("processes") or {}
    for item in trace["spans"]:
        try:
            tags = _tags(item.get("tags"))
            name, version = _first(tags, _SCOPES), _first(tags, _SCOPE_VERSIONS)
            key = (str(item.get("processID")), name, version)
            if key not in origins:
                process = item.get("process") or processes.get(key[0]) or {}
                service = {"service.name": process.get("serviceName"), **_tags(process.get("tags"))}
                scope = InstrumentationScope(name=name, version=version) if name else None
                origins[key] = Origin(Resource(attributes=key_values(service)), scope)
            yield Item(_span(item, tags), origins[key])
        except SHAPE_ERRORS as error:
            yield fault_of(error)


def _span(item: Mapping[str, Any], tags: Mapping[str, Any]) -> Span:
    trace_id, begin = _hex(item["traceID"], 32), int(item["startTime"]) * 1000
    references = item.get("references") or []
    above = [
        reference
        for reference in references
        if reference.get("refType") == "CHILD_OF" and _hex(reference["traceID"], 32) == trace_id
    ]
    parent = _hex(above[0]["spanID"], 16) if above else _hex(item.get("parentSpanID") or "0", 16)
    failed = tags.get("error") is True or tags.get("otel.status_code") == "ERROR"
    code = 2 if failed else 1 if tags.get("otel.status_code") == "OK" else 0
    more = {"jaeger.warnings": item["warnings"]} if item.get("warnings") else {}
    attributes = {**{key: value for key, value in tags.items() if key not in _OWN_TAGS}, **more}
    if failed and attributes.get("error") is True:
        del attributes["error"]
    return Span(
        trace_id=trace_id,
        span_id=_hex(item["spanID"], 16),
        parent_span_id=parent if any(parent) else b"",
        trace_state=str(tags.get("w3c.tracestate") or ""),
        name=str(item.get("operationName") or ""),
        kind=_KINDS.get(str(tags.get("span.kind")), 0),  # type: ignore[arg-type]
        start_time_unix_nano=begin,
        end_time_unix_nano=begin + int(item.get("duration") or 0) * 1000,
        attributes=key_values(attributes),
        events=[_event(log) for log in item.get("logs") or ()],
        links=[
            Span.Link(trace_id=_hex(reference["traceID"], 32), span_id=_hex(reference["spanID"], 16))
            for reference in references
            if reference not in above[:1]
        ],
        status=Status(code=code, message=str(tags.get("otel.status_description") or "")) if code else None,  # type: ignore[arg-type]
    )


def _event(log: Mapping[str, Any]) -> Span.Event:
    fields = _tags(log.get("fields"))
    name = str(fields.pop("event", "") or fields.pop("name", "") or "log")
    return Span.Event(time_unix_nano=int(log["timestamp"]) * 1000, name=name, attributes=key_values(fields))


def _tags(tags: Any) -> JsonObject:
    """Name → value, with the type that the tag states."""
    return {str(tag["key"]): _value(tag.get("type"), tag.get("value")) for tag in tags or ()}


def _value(kind: Any, value: Any) -> Any:
    match kind:
        case "int64" if isinstance(value, str):
            return int(value)
        case "float64":
            return float(value)
        case "bool" if isinstance(value, str):
            return value == "true"
        case "binary" if isinstance(value, str):
            return b64decode(value)
    return value


def _hex(text: str, n_digits: int) -> bytes:
    """An id; Jaeger leaves out zeros at its beginning."""
    if len(text) > n_digits:
        raise InvalidRecordError(f"the id {text[:40]!r} is too long")
    return bytes.fromhex(text.zfill(n_digits))


def _first(tags: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((str(tags[name]) for name in names if tags.get(name)), "")


def _is_trace(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("spans"), list) and "traceID" in value


def _is_jaeger(value: Any) -> bool:
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        return bool(value["data"]) and _is_trace(value["data"][0])
    return _is_trace(value)


JAEGER = Format("jaeger", "Jaeger", _is_jaeger, _JaegerReader, has_identities=True)

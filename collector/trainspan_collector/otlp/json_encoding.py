"""OTLP/JSON: a request's JSON → its protobuf message, and messages → JSON.

It is protobuf's JSON except for ids, which are hex, not base64. Enumerations are integers, 64-bit numbers are strings or
numbers, and unknown members are ignored. Spec: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import Message

from trainspan_collector.otlp.signals import OtlpSignal
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry.utf8 import well_formed

__all__ = ["encodable", "from_json", "parsed_bytes", "to_json"]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a pair: may be alone in JavaScript's strings, not in UTF-8
_BYTES_PER_OBJECT = 300
_BYTES_PER_VALUE = 64
_Object = dict[str, Any]
"""Of a client's JSON: its members have any form."""
_IDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")


def from_json(signal: OtlpSignal, body: bytes) -> bytes:
    """The request in protobuf. Raises InvalidRecordError if `body` is not such a request."""
    message = signal.request()
    try:
        content = json.loads(body.decode())
        if not isinstance(content, dict):
            raise InvalidRecordError(f"the body is a JSON {type(content).__name__}, not an object")
        if _SURROGATE.search(body):
            content = well_formed(content, "OTLP/JSON")
        _encode_ids(content)
        ParseDict(content, message, ignore_unknown_fields=True)
        packed: bytes = message.SerializeToString()
    except (ParseError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, InvalidRecordError):
            raise
        raise InvalidRecordError(
            f"the body of {len(body)} bytes is not an {signal.request.__name__} in JSON: {str(error)[:300]}"
        ) from error
    return packed


def parsed_bytes(body: bytes) -> int:
    """Approximate upper bound on the memory that parsing takes, counted on the text before parsing."""
    return (
        _BYTES_PER_OBJECT * (body.count(b"{") + body.count(b"[")) + _BYTES_PER_VALUE * body.count(b",") + 4 * len(body)
    )


def to_json(message: Message) -> bytes:
    """In OTLP's form: lowerCamelCase names, integers for enumerations."""
    text: str = MessageToJson(message, indent=None, use_integers_for_enums=True, ensure_ascii=False)
    return text.encode()


def encodable(text: str) -> str:
    """The text with U+FFFD for each unpaired surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _encode_ids(content: _Object) -> None:
    """Converts hex ids to base64, in place, wherever OTLP has ids."""
    for item in _bearers(content):
        for name in _IDS:
            value = item.get(name)
            if value is None:
                continue
            try:
                item[name] = b64encode(bytes.fromhex(value)).decode()
            except (TypeError, ValueError) as error:
                raise InvalidRecordError(f"{name} {str(value)[:40]!r} is not hex") from error


def _bearers(content: _Object) -> Iterator[_Object]:
    """Spans with their links, log records, and metric points' exemplars."""
    for scope_item in _inner(content, ("resourceSpans", "resource_spans"), ("scopeSpans", "scope_spans")):
        for span in _members(scope_item, "spans"):
            yield span
            yield from _members(span, "links")
    for scope_item in _inner(content, ("resourceLogs", "resource_logs"), ("scopeLogs", "scope_logs")):
        yield from _members(scope_item, "logRecords", "log_records")
    for scope_item in _inner(content, ("resourceMetrics", "resource_metrics"), ("scopeMetrics", "scope_metrics")):
        for metric in _members(scope_item, "metrics"):
            for data in metric.values():
                for point in _members(data, "dataPoints", "data_points") if isinstance(data, dict) else ():
                    yield from _members(point, "exemplars")


def _inner(content: _Object, of_resource: tuple[str, str], of_scope: tuple[str, str]) -> Iterator[_Object]:
    for resource_item in _members(content, *of_resource):
        yield from _members(resource_item, *of_scope)


def _members(parent: _Object, *names: str) -> Iterator[_Object]:
    """The objects in the lists with these names; the parser refuses anything else in them."""
    for name in names:
        items = parent.get(name)
        if isinstance(items, list):
            yield from (item for item in items if isinstance(item, dict))

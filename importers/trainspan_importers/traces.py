"""Spans and evaluations as OTLP messages. Ids are those of the source, or hashes of them: the same record gives the same ids."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from trainspan_schemas.errors import InvalidRecordError, one_line
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = [
    "SHAPE_ERRORS",
    "UNDATED_NS",
    "Item",
    "Origin",
    "Trace",
    "compact_json",
    "fault_of",
    "id_in",
    "kept_fields",
    "key_values",
    "nanoseconds",
    "origin_of",
    "span_id_of",
    "trace_id_of",
]

SHAPE_ERRORS: Final = (
    InvalidRecordError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What a record of another shape than its format's makes a reader raise."""

UNDATED_NS: Final = 1_577_836_800 * 10**9
"""2020-01-01, when the calls of files without times begin."""
_HEX: Final = re.compile(r"[0-9a-f]+")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INT64: Final = 2**63
_NS: Final = 10**9


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where spans come from; spans that share an origin are sent together."""

    resource: Resource
    scope: InstrumentationScope | None = None
    resource_schema: str = ""
    scope_schema: str = ""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to send."""

    message: Span | LogRecord
    origin: Origin


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace of a source, which becomes one rollout."""

    format: str
    source_id: str
    origin: Origin
    id: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", trace_id_of(self.format, self.source_id))

    @property
    def root_id(self) -> bytes:
        """The span id of the root, for sources whose traces are no spans of their own."""
        return _hash(self.format, "root", self.source_id)[:8]

    def span_id(self, source_id: str) -> bytes:
        return span_id_of(self.format, source_id)

    def span(
        self,
        span_id: bytes,
        parent_id: bytes | None,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Any],
        *,
        error: str | None = None,
    ) -> Item:
        """A span; `error` marks it as failed. A span that ends before it begins has no duration."""
        status = None if error is None else Status(code=Status.STATUS_CODE_ERROR, message=error)
        span = Span(
            trace_id=self.id,
            span_id=span_id,
            parent_span_id=parent_id or b"",
            name=name,
            start_time_unix_nano=start_ns,
            end_time_unix_nano=max(start_ns, end_ns),
            attributes=key_values(attributes),
            status=status,
        )
        return Item(span, self.origin)

    def evaluation(
        self,
        source_id: str,
        name: str,
        *,
        score: float | None,
        time_ns: int,
        span_id: bytes | None = None,
        label: str | None = None,
        explanation: str | None = None,
        is_human: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> Item:
        """An evaluation of the trace, or of one of its spans. Its rollout is that of the trace, whichever that is."""
        attributes = {
            **(more or {}),
            "event.name": keys.EVALUATION_EVENT,
            keys.EVALUATION_NAME: name,
            keys.EVALUATION_SCORE: score,
            keys.EVALUATION_LABEL: label,
            keys.EVALUATION_EXPLANATION: explanation,
            keys.EVALUATION_SOURCE: "human" if is_human else "agent",
            keys.EVALUATION_ID: _hash(self.format, "evaluation", source_id)[:16].hex(),
            keys.EVALUATION_OF: "rollout" if span_id is None else None,
        }
        record = LogRecord(
            time_unix_nano=time_ns, trace_id=self.id, span_id=span_id or b"", attributes=key_values(attributes)
        )
        return Item(record, self.origin)


def fault_of(error: Exception) -> InvalidRecordError:
    """One of SHAPE_ERRORS as what a user is told."""
    return error if isinstance(error, InvalidRecordError) else InvalidRecordError(one_line(error))


def trace_id_of(format_name: str, source_id: str) -> bytes:
    """16 bytes: a trace id in hex or a UUID as it is, else a hash."""
    text = source_id.lower()
    if _UUID.fullmatch(text):
        text = text.replace("-", "")
    if len(text) == 32 and _HEX.fullmatch(text) and text.strip("0"):
        return bytes.fromhex(text)
    return _hash(format_name, "trace", source_id)[:16]


def span_id_of(format_name: str, source_id: str) -> bytes:
    """8 bytes: a span id in hex as it is, else a hash."""
    text = source_id.lower()
    if len(text) == 16 and _HEX.fullmatch(text) and text.strip("0"):
        return bytes.fromhex(text)
    return _hash(format_name, "span", source_id)[:8]


def _hash(*words: str) -> bytes:
    return hashlib.sha256(json.dumps(words).encode()).digest()


def origin_of(format_name: str, service: str | None = None, **attributes: Any) -> Origin:
    """The origin of spans whose source names at most a service."""
    resource = Resource(attributes=key_values({"service.name": service or format_name, **attributes}))
    return Origin(resource, InstrumentationScope(name=f"trainspan.import.{format_name}"))


def key_values(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """OTLP attributes; None is left out, and what is no list of plain values becomes JSON text."""
    return [KeyValue(key=key, value=_any_value(value)) for key, value in attributes.items() if value is not None]


def _any_value(value: Any) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value) if -_INT64 <= value < _INT64 else AnyValue(string_value=str(value))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, list) and all(isinstance(item, (str, bool, int, float)) for item in value):
        return AnyValue(array_value=ArrayValue(values=[_any_value(item) for item in value]))
    return AnyValue(string_value=compact_json(value))


def compact_json(value: Any) -> str:
    """The value as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def id_in(record: Mapping[str, Any], name: str) -> str:
    """The id in this field. Raises InvalidRecordError."""
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRecordError(f"{name} is {str(value)[:40]!r}")
    return value


def kept_fields(prefix: str, record: Mapping[str, Any], used: Iterable[str] = ()) -> JsonObject:
    """`PREFIX.FIELD` for each field that is not empty and not in `used`."""
    skipped = frozenset(used)
    return {
        f"{prefix}.{name}": value
        for name, value in record.items()
        if name not in skipped and value not in (None, "", [], {})
    }


_MOST_S: Final = 2**63 // _NS
"""Nanoseconds of a later time do not fit into 64 bits."""


def nanoseconds(value: Any, what: str) -> int:
    """A time: ISO 8601 text (UTC if it names no zone), or a number of seconds, milliseconds, micro- or nanoseconds since 1970.

    The unit of a number follows from its size: each is 1000 times the one before, and all times are between 1973 and 2262.
    Raises InvalidRecordError.
    """
    if isinstance(value, str):
        try:
            if value.isdecimal():
                return nanoseconds(int(value), what)
            moment = datetime.fromisoformat(_iso(value))
        except ValueError as error:
            raise InvalidRecordError(f"{what} is {value[:40]!r}: not a time") from error
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        whole = int(moment.replace(microsecond=0).timestamp())
        if not 0 <= whole < _MOST_S:
            raise InvalidRecordError(f"{what} is {value[:40]!r}: not between 1970 and 2262")
        return whole * _NS + _fraction_ns(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InvalidRecordError(f"{what} is {str(value)[:40]!r}: not a time")
    for limit, factor in ((10**11, 10**9), (10**14, 10**6), (10**17, 10**3), (2**63, 1)):
        if value < limit and value * factor < 2**63:
            return round(value * factor) if isinstance(value, float) else value * factor
    raise InvalidRecordError(f"{what} is {value}: not a time")


def _iso(text: str) -> str:
    """With at most six digits of a second's fraction, as Python reads them."""
    return re.sub(r"([.,]\d{6})\d+", r"\1", text.strip().replace(" UTC", "+00:00"))


def _fraction_ns(text: str) -> int:
    fraction = re.search(r"[.,](\d+)", text)
    return int(fraction[1][:9].ljust(9, "0")) if fraction else 0

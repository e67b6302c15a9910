"""Phoenix: spans and annotations, as its REST API, its client and its dataframes have them.

Schema: https://arize.com/docs/phoenix/sdk-api-reference/rest-api (spans with `context`, `span_kind` and attributes of
OpenInference, spans in OTLP, annotations of spans and traces). The records of a dataframe have the same fields with flat names. A
span's annotation names its span and not the span's trace, so annotations are read before spans, and need them in the same import.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from trainspan_importers.account import Account
from trainspan_importers.otlp_json import span_of
from trainspan_importers.reading import Converted, Format, Reader, each
from trainspan_importers.recorded import number_of
from trainspan_importers.traces import Item, Trace, kept_fields, key_values, nanoseconds, origin_of
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import JsonObject

__all__ = ["PHOENIX"]

_NAME: Final = "phoenix"
_SPAN_FIELDS: Final = (
    *("id", "name", "context", "span_kind", "parent_id", "start_time", "end_time", "status_code", "status_message"),
    *("attributes", "events", "annotations"),
)
_ANNOTATION_FIELDS: Final = (
    *("id", "name", "annotation_name", "span_id", "trace_id", "result", "created_at", "updated_at"),
    *("label", "score", "explanation"),
)
_OTLP_TIMES: Final = {"startTimeUnixNano": "traceId", "start_time_unix_nano": "trace_id"}
"""Member of a span in OTLP → its id's, as the schema and as a server writes them."""
_TEXTS: Final = (
    *("input.value", "output.value", "llm.invocation_parameters", "metadata", "tool.parameters", "json_schema"),
    *("arguments", "tool_call.function.arguments"),
)
"""Attributes that OpenInference has as JSON text: values that were parsed are text again."""


class _PhoenixReader(Reader):
    def __init__(self, account: Account) -> None:
        self._account = account
        self._origin = origin_of(_NAME)
        self._annotations: dict[str, list[Mapping[str, Any]]] = {}
        """Span → its annotations, until it comes."""

    def add(self, value: Any) -> Iterator[Converted]:
        if not isinstance(value, dict):
            raise InvalidRecordError("no object")
        if isinstance(value.get("data"), list):
            yield from each(value["data"], self.add)
        elif _is_annotation(value):
            yield from self._annotation(_nested(value, "result"))
        elif _is_span(value):
            yield from self._span(value)
        elif not value.keys() <= {"next_cursor"}:
            raise InvalidRecordError("neither a span nor an annotation")

    def end(self) -> Iterator[Converted]:
        self._account.leave_out("annotation_without_its_span", n_parts=sum(map(len, self._annotations.values())))
        return iter(())

    def _annotation(self, value: JsonObject) -> Iterator[Converted]:
        if value.get("span_id"):
            self._annotations.setdefault(str(value["span_id"]), []).append(value)
        elif value.get("trace_id"):
            yield _evaluation(value, Trace(_NAME, _hex(value["trace_id"], 16).hex(), self._origin))
        else:
            self._account.leave_out("annotation_of_a_session")

    def _span(self, value: Mapping[str, Any]) -> Iterator[Converted]:
        is_otlp = not value.keys().isdisjoint(_OTLP_TIMES)
        span = span_of(value) if is_otlp else _span_of(_nested(value, "context", "attributes"))
        yield Item(span, self._origin)
        trace = Trace(_NAME, span.trace_id.hex(), self._origin)
        own = value.get("annotations")
        annotations = (*(own if isinstance(own, list) else ()), *self._annotations.pop(span.span_id.hex(), ()))
        yield from each(annotations, lambda annotation: iter([_evaluation(annotation, trace, span)]))


def _span_of(value: Mapping[str, Any]) -> Span:
    context = value["context"]
    begin = nanoseconds(value["start_time"], "start_time")
    kind = value.get("span_kind")
    attributes = {
        **dict(_flat(value.get("attributes") or {}, "")),
        **kept_fields("phoenix", value, _SPAN_FIELDS),
    }
    if isinstance(kind, str) and kind:
        attributes.setdefault("openinference.span.kind", kind)
    code = {"OK": 1, "ERROR": 2}.get(str(value.get("status_code")), 0)
    return Span(
        trace_id=_hex(context["trace_id"], 16),
        span_id=_hex(context["span_id"], 8),
        parent_span_id=_hex(value["parent_id"], 8) if value.get("parent_id") else b"",
        name=str(value.get("name") or ""),
        start_time_unix_nano=begin,
        end_time_unix_nano=nanoseconds(value["end_time"], "end_time") if value.get("end_time") else begin,
        attributes=key_values(attributes),
        events=[_event(event) for event in value.get("events") or ()],
        status=Status(code=code, message=str(value.get("status_message") or "")) if code else None,  # type: ignore[arg-type]
    )


def _event(event: Mapping[str, Any]) -> Span.Event:
    time_ns = nanoseconds(event.get("timestamp"), "an event's timestamp")
    attributes = dict(_flat(event.get("attributes") or {}, ""))
    return Span.Event(time_unix_nano=time_ns, name=str(event.get("name") or ""), attributes=key_values(attributes))


def _evaluation(annotation: Mapping[str, Any], trace: Trace, span: Span | None = None) -> Item:
    """The annotation of a span, or of the whole trace."""
    result = annotation.get("result") or annotation
    name = str(annotation["name"] if "name" in annotation else annotation["annotation_name"])
    target = trace.source_id if span is None else span.span_id.hex()
    identity = str(annotation.get("id") or f"{target} {name} {annotation.get('identifier') or ''}")
    label, explanation = result.get("label"), result.get("explanation")
    time = annotation.get("updated_at") or annotation.get("created_at")
    return trace.evaluation(
        identity,
        name,
        score=number_of(result.get("score")),
        label=None if label is None else str(label),
        time_ns=nanoseconds(time, "created_at") if time or span is None else span.end_time_unix_nano,
        span_id=None if span is None else span.span_id,
        explanation=None if explanation is None else str(explanation),
        is_human=annotation.get("annotator_kind") == "HUMAN",
        more=kept_fields("phoenix.annotation", annotation, _ANNOTATION_FIELDS),
    )


def _nested(value: Mapping[str, Any], *groups: str) -> JsonObject:
    """A record of a dataframe (`context.span_id`, `attributes.llm.model_name`) with the fields of a group in an object."""
    if groups[0] in value:
        return dict(value)
    record: JsonObject = {}
    for name, item in value.items():
        first, _, rest = name.partition(".")
        if first in groups and rest:
            record.setdefault(first, {})[rest] = item
        else:
            record[name] = item
    return record


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """OpenInference's flat attributes: members with dots, and lists of objects by number; what is empty is left out."""
    if isinstance(value, dict) and not _is_text(prefix):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value) and not _is_text(prefix):
        for number, item in enumerate(value):
            yield from _flat(item, f"{prefix}.{number}")
    elif value is not None and prefix:
        yield (
            prefix,
            json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) and _is_text(prefix) else value,
        )


def _is_text(name: str) -> bool:
    return name.endswith(_TEXTS)


def _hex(text: Any, n_bytes: int) -> bytes:
    try:
        id_bytes = bytes.fromhex(text)
    except (TypeError, ValueError):
        id_bytes = b""
    if len(id_bytes) != n_bytes:
        raise InvalidRecordError(f"the id {str(text)[:40]!r} is not {n_bytes} bytes in hex")
    return id_bytes


def _is_annotation(value: Mapping[str, Any]) -> bool:
    is_named = "name" in value or "annotation_name" in value
    return "annotator_kind" in value and is_named and not value.keys().isdisjoint(("span_id", "trace_id", "session_id"))


def _is_span(value: Mapping[str, Any]) -> bool:
    has_context = isinstance(value.get("context"), dict) or "context.span_id" in value
    return has_context or any({time, trace_id} <= value.keys() for time, trace_id in _OTLP_TIMES.items())


def _is_phoenix(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("data"), list):
        is_empty_page = not value["data"] and value.keys() == {"data", "next_cursor"}
        return is_empty_page or any(isinstance(item, dict) and _is_phoenix(item) for item in value["data"][:1])
    return _is_annotation(value) or _is_span(value)


def _is_of_annotations(value: Any) -> bool:
    first = value["data"][0] if isinstance(value, dict) and value.get("data") else value
    return isinstance(first, dict) and _is_annotation(first)


PHOENIX = Format(_NAME, "Phoenix", _is_phoenix, _PhoenixReader, comes_first=_is_of_annotations, has_identities=True)

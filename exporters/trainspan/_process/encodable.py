"""Makes spans and log records that protobuf can encode.

One half character (lone surrogate) in a name loses the whole batch, one in an attribute, or an integer beyond 64 bits,
loses the attribute. They are escaped, and counted; everything else is sent as it is.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Status

from trainspan._guard import guarded, refuse
from trainspan_schemas.telemetry.utf8 import escaped

__all__ = ["encodable"]

_OF_RECORD: Final = ("body", "severity_text", "attributes", "event_name")


@guarded
def encodable(items: Sequence[Any]) -> list[Any]:
    """Returns spans or log records that can be sent; an item that already can be is itself in the list."""
    return [_span(item) if isinstance(item, ReadableSpan) else _record(item) for item in items]


def _is_clean(value: Any) -> bool:
    if isinstance(value, str):
        return value.isascii() or escaped(value) is value
    if isinstance(value, int):
        return -(2**63) <= value < 2**63  # a range would go through all of them for a subclass of int
    if isinstance(value, Mapping):
        return all(_is_clean(key) and _is_clean(item) for key, item in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_is_clean, value))


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item) for item in value]
    if _is_clean(value):
        return value
    if isinstance(value, str):
        refuse("half_characters", "text that is not valid Unicode is sent with its half characters escaped")
        return escaped(value)
    refuse("integer_too_long", "an integer of more than 64 bits is sent as text")
    return str(value)


def _span(span: ReadableSpan) -> ReadableSpan:
    status, scope = span.status, span.instrumentation_scope
    events = [(event.name, event.attributes) for event in span.events]
    parts = (span.name, span.attributes, status.description, events, [link.attributes for link in span.links])
    if _is_clean(parts) and _is_clean(span.resource.attributes) and _is_clean(_parts_of(scope)):
        return span
    return ReadableSpan(
        _cleaned(span.name),
        span.context,
        span.parent,
        _resource(span.resource),
        _attributes(span),
        _bounded(
            [Event(_cleaned(each.name), _attributes(each), each.timestamp) for each in span.events], span.dropped_events
        ),
        _bounded([Link(each.context, _attributes(each)) for each in span.links], span.dropped_links),
        span.kind,
        status=Status(status.status_code, _cleaned(status.description)),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=_scope(scope),
    )


def _attributes(holder: Any) -> BoundedAttributes:
    """Of a span, an event or a link, with the number of those that the SDK dropped at its limits."""
    attributes = BoundedAttributes(attributes=_cleaned(holder.attributes or {}))
    attributes.dropped = getattr(holder, "dropped_attributes", 0)
    return attributes


def _bounded(items: Sequence[Any], n_dropped: int) -> BoundedList[Any]:
    bounded = BoundedList.from_seq(len(items), items)
    bounded.dropped = n_dropped
    return bounded


def _record(item: Any) -> Any:
    """A log record; releases of OpenTelemetry keep resource and scope beside it or in it."""
    record = getattr(item, "log_record", item)
    fields = {name: getattr(record, name, None) for name in _OF_RECORD}
    holder = item if hasattr(item, "resource") else record
    resource, scope = getattr(holder, "resource", None), getattr(item, "instrumentation_scope", None)
    if _is_clean(fields) and _is_clean(resource and resource.attributes) and _is_clean(_parts_of(scope)):
        return item
    changed = {name: _cleaned(value) for name, value in fields.items() if value is not None}
    if "attributes" in changed:
        changed["attributes"] = _Attributes(changed["attributes"])
        changed["attributes"].dropped = getattr(record.attributes, "dropped", 0)
    record = _replaced(record, changed)
    if resource is not None and holder is not item:
        record = _replaced(record, {"resource": _resource(resource)})
    changes = {"log_record": record, "instrumentation_scope": _scope(scope)}
    return _replaced(item, changes | ({"resource": _resource(resource)} if resource and holder is item else {}))


class _Attributes(dict[str, Any]):
    """What the SDK reads of a log record's attributes."""

    dropped = 0


def _replaced(holder: Any, changes: Mapping[str, Any]) -> Any:
    holder = copy.copy(holder)
    for name, value in changes.items():
        object.__setattr__(holder, name, value)  # some releases freeze them
    return holder


def _resource(resource: Resource) -> Resource:
    return Resource(_cleaned(resource.attributes), resource.schema_url)


def _parts_of(scope: InstrumentationScope | None) -> tuple[Any, ...]:
    return (scope.name, scope.version, scope.schema_url, getattr(scope, "attributes", None)) if scope else ()


def _scope(scope: InstrumentationScope | None) -> InstrumentationScope | None:
    return InstrumentationScope(*_cleaned(_parts_of(scope))) if scope else None

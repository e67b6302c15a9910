"""OTLP spans → rows of `stored.spans`, and the evaluations among their events."""

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from trainspan_collector.journal.trust import Sender, is_trusted_span
from trainspan_collector.otlp import lookups as look
from trainspan_collector.otlp.values import Attributes, Json, read_attributes, to_json_text, to_plain
from trainspan_collector.rows.promoted import read_promoted
from trainspan_collector.rows.tokens import pack_ids, pack_logprobs
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.store.tables import SpanRow
from trainspan_schemas.telemetry import keys

__all__ = ["SIZE", "Origin", "content_of", "rank_of", "read_origin", "read_span", "signed", "span_bytes", "span_events"]

_MAX_INT64: Final = 2**63 - 1
_VERDICT: Final = 7 << 60  # more than any span of tokens
SIZE: Final = (1 << 60) - 1
"""The bits of the richness below its flags."""
_PACKERS: Final = {
    keys.PROMPT_TOKEN_IDS: pack_ids,
    keys.COMPLETION_TOKEN_IDS: pack_ids,
    keys.COMPLETION_LOGPROBS: pack_logprobs,
}

_Text: TypeAlias = str | None
_Number: TypeAlias = int | None
_Packed: TypeAlias = bytes | None
_Texts: TypeAlias = tuple[str, str, str]
"""Attributes, events and links."""
_Core: TypeAlias = tuple[
    str, str, _Text, str, int, int, int, int, str, _Text, str, str, str, str, str, str, str, int, int, int, int
]
_Identity: TypeAlias = tuple[_Text, _Number, _Text, _Text, _Number, _Text, _Text, _Text, _Text, _Text, _Number]
_Call: TypeAlias = tuple[bool, _Number, _Text, _Number, _Packed, _Packed, _Packed, _Text, bool | None]


class Origin(NamedTuple):
    """The values shared by the spans or log records of one (resource, scope)."""

    service_name: str | None
    resource: str
    scope_name: str
    scope_json: str
    rollout: tuple[str | None, int | None] = (None, None)
    """Rollout id and attempt of what states none itself: OTEL_RESOURCE_ATTRIBUTES reaches programs that ignore TRACEPARENT."""


class Event(NamedTuple):
    name: str
    time_ns: int
    attributes: Attributes
    dropped_attributes: int


def read_origin(
    resource: Resource, resource_schema_url: str, scope: InstrumentationScope, scope_schema_url: str
) -> Origin:
    of_resource = read_attributes(resource.attributes)
    rest: dict[str, Json] = {
        "version": scope.version,
        "schema_url": scope_schema_url,
        "dropped_attributes": scope.dropped_attributes_count,
        "resource_schema_url": resource_schema_url,
        "resource_dropped_attributes": resource.dropped_attributes_count,
    }
    scope_json = _with_attributes(
        {key: value for key, value in rest.items() if value}, read_attributes(scope.attributes)
    )
    service = look.text(of_resource.plain, "service.name")
    return Origin(service, of_resource.text, scope.name, scope_json, look.identity(of_resource.plain))


def signed(value: int) -> int:
    """A uint64 as BIGINT; a value that does not fit (times after the year 2262) becomes the maximum."""
    return min(value, _MAX_INT64)


def span_events(span: Span) -> list[Event]:
    return [
        Event(
            event.name, signed(event.time_unix_nano), read_attributes(event.attributes), event.dropped_attributes_count
        )
        for event in span.events
    ]


def read_span(
    seq: int, span: Span, events: list[Event], origin: Origin, *, sender: Sender, received_ns: int
) -> tuple[SpanRow, Mapping[str, Json]]:
    """The row, and the attributes for lookup."""
    read = read_attributes(span.attributes, _PACKERS)
    packed, malformed = _pack_tokens(read.skipped)
    plain = read.plain
    is_call = keys.PROMPT_TOKEN_IDS in packed or keys.COMPLETION_TOKEN_IDS in packed
    rollout_status, boundary = look.text(plain, keys.ROLLOUT_STATUS), look.text(plain, keys.ROLLOUT_BOUNDARY)
    judge = look.text(plain, keys.ROLLOUT_JUDGE)
    untrusted = not is_trusted_span(sender, status=rollout_status, boundary=boundary, judge=judge)
    is_verdict = sender is Sender.RUNNER and rollout_status is not None
    texts = _with_more(read.text, malformed), _events_json(events), _links_json(span)
    status, end_ns = span.status, signed(span.end_time_unix_nano)
    # Not the message's ByteSize, which takes half as long as all the rest of this function.
    size = sum(map(len, (*texts, span.name, status.message, *packed.values()))) + (status.code > 0)
    row = SpanRow(  # by position: names would take 2 µs per span, a tenth of the total
        seq,
        int.from_bytes(span.span_id, "big"),
        _richness(size, has_tokens=is_call, has_ended=end_ns > 0, untrusted=untrusted, is_verdict=is_verdict),
        *_core(span, status, end_ns, origin, texts),
        *_identity(plain, origin, rollout_status, boundary, judge),
        *_call(plain, packed, is_call),
        untrusted,
        received_ns,
        *read_promoted({**plain, **malformed} if malformed else plain, is_call=is_call),
        look.boolean(plain, keys.ROLLOUT_OWN_REWARD),
        look.text(plain, keys.LAST_CALL),
        None,
    )
    return row, plain


def _core(span: Span, status: Status, end_ns: int, origin: Origin, texts: _Texts) -> _Core:
    """The columns `trace_id` to `dropped_links`."""
    attributes, events, links = texts
    return (
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex() if any(span.parent_span_id) else None,
        span.name,
        span.kind,
        signed(span.start_time_unix_nano),
        end_ns,
        status.code,
        status.message,
        origin.service_name,
        origin.scope_name,
        origin.scope_json,
        attributes,
        origin.resource,
        events,
        links,
        span.trace_state,
        span.flags,
        span.dropped_attributes_count,
        span.dropped_events_count,
        span.dropped_links_count,
    )


def _identity(
    plain: Mapping[str, Json], origin: Origin, status: str | None, boundary: str | None, judge: str | None
) -> _Identity:
    """The columns `rollout_id` to `rollout_calls`."""
    rollout_id, attempt = look.identity(plain) if keys.ROLLOUT_ID in plain else origin.rollout
    return (
        rollout_id,
        (attempt or 0) if rollout_id else attempt,
        look.text(plain, keys.TASK_ID),
        look.text(plain, keys.RUN_ID),
        look.integer(plain, keys.ROUND),
        look.text(plain, keys.SPLIT),
        look.text(plain, keys.GEN_AI_AGENT_NAME),
        status,
        boundary,
        judge,
        look.integer(plain, keys.ROLLOUT_CALLS),
    )


def _call(plain: Mapping[str, Json], packed: Mapping[str, bytes], is_call: bool) -> _Call:
    """The columns `is_call` to `delivered`."""
    return (
        is_call,
        look.integer(plain, keys.CALL_INDEX),
        look.text(plain, keys.POLICY_NAME),
        look.integer(plain, keys.POLICY_VERSION),
        packed.get(keys.PROMPT_TOKEN_IDS),
        packed.get(keys.COMPLETION_TOKEN_IDS),
        packed.get(keys.COMPLETION_LOGPROBS),
        look.first_text(plain, keys.GEN_AI_FINISH_REASONS),
        look.boolean(plain, keys.CALL_DELIVERED),
    )


def _pack_tokens(values: Mapping[str, AnyValue]) -> tuple[dict[str, bytes], dict[str, Json]]:
    """Packed token attributes, and malformed ones, which stay attributes."""
    packed: dict[str, bytes] = {}
    malformed: dict[str, Json] = {}
    for key, value in values.items():
        try:
            packed[key] = _PACKERS[key](value)
        except InvalidRecordError:
            malformed[key] = to_plain(value)
    return packed, malformed


def span_bytes(row: SpanRow) -> int:
    """The approximate size of a span's texts and tokens, those that it shares with other spans included."""
    shared = len(row.resource) + len(row.scope_json) + len(row.scope_name) + len(row.service_name or "")
    return (row.richness & SIZE) + shared + len(row.trace_state)


def rank_of(row: SpanRow) -> int:
    """Of copies of one span, the one of the greatest rank stays, of several the last export that differs from the one before: the
    runner's own span, then trusted ones, those with tokens, those that have ended, and the one that ended last. A copy's size tells
    nothing: what it corrects may be shorter."""
    return row.richness & ~SIZE | max(row.end_ns, 0) // 1000


def content_of(row: SpanRow) -> object:
    """What differs between two exports of a span that do not say the same."""
    return row.name, row.status_code, row.status_message, row.attributes, row.events, row.links


def _richness(size: int, *, has_tokens: bool, has_ended: bool, untrusted: bool, is_verdict: bool) -> int:
    """The flags that decide between copies of a span (`rank_of`), and below them its size."""
    richness = _VERDICT | size if is_verdict else has_tokens << 62 | has_ended << 61 | size
    return richness - 2**63 if untrusted else richness


def _events_json(events: list[Event]) -> str:
    if not events:
        return "[]"
    return f"[{','.join(_event_json(event) for event in events)}]"


def _event_json(event: Event) -> str:
    head: dict[str, Json] = {
        "name": event.name,
        "time_ns": event.time_ns,
        "dropped_attributes": event.dropped_attributes,
    }
    return _with_attributes(head, event.attributes)


def _links_json(span: Span) -> str:
    if not span.links:
        return "[]"
    return f"[{','.join(_link_json(link) for link in span.links)}]"


def _link_json(link: Span.Link) -> str:
    head: dict[str, Json] = {
        "trace_id": link.trace_id.hex(),
        "span_id": link.span_id.hex(),
        "trace_state": link.trace_state,
        "flags": link.flags,
        "dropped_attributes": link.dropped_attributes_count,
    }
    return _with_attributes(head, read_attributes(link.attributes))


def _with_attributes(head: dict[str, Json], attributes: Attributes) -> str:
    """One JSON object: `head` and the member "attributes", whose text may contain a key twice."""
    separator = "," if head else ""
    return f'{to_json_text(head)[:-1]}{separator}"attributes":{attributes.text}}}'


def _with_more(text: str, more: dict[str, Json]) -> str:
    if not more:
        return text
    return text[:-1] + ("," if len(text) > 2 else "") + to_json_text(more)[1:]

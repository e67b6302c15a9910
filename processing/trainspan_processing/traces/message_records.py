"""Reads messages that instrumentations put into log records next to the span of their call.

One record has all messages of a call (the event `gen_ai.client.inference.operation.details`), or, before version 1.37 of the
GenAI conventions, each message has its own record (`gen_ai.user.message`, …, `gen_ai.choice`). Both become attributes of their
span, as if the instrumentation had put them there; the span's own attributes take precedence.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.span_words import SpanKey
from trainspan_processing.text.dialects import Message, plain
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry import keys

__all__ = ["read_records", "with_records"]

_DETAILS: Final = "gen_ai.client.inference.operation.details"
_CHOICE: Final = "gen_ai.choice"
_ROLES: Final = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_EVENTS: Final = (_DETAILS, _CHOICE, *_ROLES)
_FACTS: Final = (
    *(keys.GEN_AI_INPUT_MESSAGES, keys.GEN_AI_OUTPUT_MESSAGES),
    *(keys.GEN_AI_SYSTEM_INSTRUCTIONS, keys.GEN_AI_TOOL_DEFINITIONS),
)
"""Attributes that are copied from the single record of a call."""
_COLUMNS: Final = ("seq", "time_ns", "trace_id", "span_id", "event_name", "body", "attributes")
_TRACES_PER_READ: Final = 10_000

Record = tuple[int, int, str, Any, Any]
"""time_ns, seq, event name, body, attributes."""


def read_records(source: Source, traces: Collection[str]) -> dict[SpanKey, JsonObject]:
    """Span → the attributes that log records of these traces add to it."""
    by_span: dict[SpanKey, list[Record]] = {}
    ids = sorted(traces)
    for start in range(0, len(ids), _TRACES_PER_READ):
        some = ids[start : start + _TRACES_PER_READ]
        for batch in source.read("records", Selection(), _COLUMNS, event_names=_EVENTS, trace_ids=some):
            for seq, time_ns, trace_id, span_id, event, body, attributes in batch.select(_COLUMNS).iter_rows():
                if span_id is not None:
                    record = (time_ns, seq, event, _loaded(body), _loaded(attributes) or {})
                    by_span.setdefault((trace_id, span_id), []).append(record)
    return {span: _attributes_of(sorted(records, key=lambda record: record[:2])) for span, records in by_span.items()}


def with_records(
    attributes: Mapping[str, Any], records: Mapping[SpanKey, Mapping[str, Any]], span: SpanKey
) -> JsonObject:
    """The attributes of `span`, with those added by its records."""
    return {**records.get(span, {}), **attributes}


def _attributes_of(records: list[Record]) -> JsonObject:
    """The attributes from one span's records, which are in order."""
    facts: JsonObject = {}
    asked: list[Message] = []
    answered: dict[int, Message] = {}
    for _, _, event, body, attributes in records:
        if event == _DETAILS:
            facts |= {key: attributes[key] for key in _FACTS if key in attributes}
            continue
        fields = plain(body)
        if not isinstance(fields, dict):
            continue
        if event == _CHOICE:
            message = fields.get("message")
            reason = {"finish_reason": fields["finish_reason"]} if "finish_reason" in fields else {}
            index = fields.get("index")
            answered[index if isinstance(index, int) else len(answered)] = {
                "role": "assistant",
                **(message if isinstance(message, dict) else {}),
                **reason,
            }
        else:
            asked.append(_asked(_ROLES[event], fields))
    messages = {
        keys.GEN_AI_INPUT_MESSAGES: asked,
        keys.GEN_AI_OUTPUT_MESSAGES: [answered[at] for at in sorted(answered)],
    }
    return {**{key: value for key, value in messages.items() if value}, **facts}


def _asked(role: str, fields: JsonObject) -> Message:
    """The message of one record, in which a tool's result names its call as `id`."""
    message: Message = {"role": role, **fields}
    if message["role"] == "tool" and "id" in message:
        message["tool_call_id"] = message.pop("id")
    return message


def _loaded(text: str | None) -> Any:
    return json.loads(text) if text else None

"""The rows of the store's tables, `stored.spans`, `stored.logs` and `stored.evaluations`: each column declared once.

The collector declares its internal tables (journal position, places, superseded rows) itself.

The fields are the columns, in order; their types say how the store keeps them. The tables, their Arrow form and the types of
the public views (views.py) come from here.

Ids are lower-case hex, and times are nanoseconds since the epoch. Attributes, resource, events, links, body and `scope_json`
are JSON text that keeps types.
"""

from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, get_args

__all__ = ["TABLES", "Column", "EvaluationRow", "LogRow", "SpanRow", "columns"]


@dataclass(frozen=True, slots=True)
class _Storage:
    """How the store keeps a value."""

    sql_type: str
    compression: str | None = None
    """DuckDB chooses if None."""


_Number = Annotated[int, _Storage("INTEGER")]
_Long = Annotated[int, _Storage("BIGINT")]
_Unsigned = Annotated[int, _Storage("UBIGINT")]
_Real = Annotated[float, _Storage("DOUBLE")]
_Flag = Annotated[bool, _Storage("BOOLEAN")]
_Hash = Annotated[bytes, _Storage("BLOB")]
_Text = Annotated[str, _Storage("VARCHAR")]
_LongText = Annotated[str, _Storage("VARCHAR", compression="zstd")]
_Ids = Annotated[bytes, _Storage("INTEGER[]")]
"""Packed, 4 bytes per item."""
_Reals = Annotated[bytes, _Storage("FLOAT[]")]
"""Packed, 4 bytes per item."""


class SpanRow(NamedTuple):
    """A row of `stored.spans`."""

    seq: _Long
    span_key: _Unsigned
    """The span id as a number: the key, with `trace_id`, for finding duplicates."""
    richness: _Long
    """Flags that decide which of two spans with the same ids is kept, and the size of its texts and tokens."""
    trace_id: _Text
    span_id: _Text
    parent_span_id: _Text | None
    name: _Text
    kind: _Number
    start_ns: _Long
    end_ns: _Long
    status_code: _Number
    status_message: _Text
    service_name: _Text | None
    scope_name: _Text
    scope_json: _Text
    """Version, attributes, schema URLs, dropped counts: omitted by the view."""
    attributes: _LongText
    resource: _Text
    events: _LongText
    links: _Text
    trace_state: _Text
    flags: _Long
    dropped_attributes: _Long
    dropped_events: _Long
    dropped_links: _Long
    rollout_id: _Text | None
    """The first of the promoted attributes, which are the columns from here on."""
    attempt: _Number | None
    task_id: _Text | None
    run_id: _Text | None
    round: _Number | None
    split: _Text | None
    agent: _Text | None
    rollout_status: _Text | None
    """Not NULL: the span is a rollout span."""
    rollout_boundary: _Text | None
    rollout_judge: _Text | None
    rollout_calls: _Number | None
    is_call: _Flag
    """It has token ids."""
    call_index: _Number | None
    policy_name: _Text | None
    policy_version: _Number | None
    prompt_ids: _Ids | None
    completion_ids: _Ids | None
    logprobs: _Reals | None
    finish_reason: _Text | None
    delivered: _Flag | None
    untrusted: _Flag
    """Its sender may not state this (see journal/trust.py of the collector)."""
    received_ns: _Long
    """When the collector received it; determines its age."""
    operation: _Text | None
    """The first of the attributes that readers query often; searching the text is the costliest part of a read. They are NULL
    if the attribute is absent or has another type."""
    request_model: _Text | None
    response_id: _Text | None
    state_key: _Text | None
    policy_version_spans: _Text | None
    redacted: _Text | None
    """JSON array."""
    call_facts: _Text | None
    """JSON object of those of CALL_FACTS that a call has. The values repeat, so it takes almost no space."""
    attribute_keys: _Text
    """Every key, enclosed in line feeds: `\\nkey\\n` finds one."""
    own_reward: _Flag | None
    """On a rollout span: the runner leaves the reward to the agent."""
    last_call: _Text | None
    """Span id of the model call that had come back last when it began, if its sender knows."""
    collides: _Flag | None
    """An earlier span has its ids but is another span."""


class LogRow(NamedTuple):
    """A row of `stored.logs`."""

    seq: _Long
    content_hash: _Hash
    time_ns: _Long
    observed_ns: _Long
    trace_id: _Text | None
    span_id: _Text | None
    event_name: _Text | None
    severity: _Number
    severity_text: _Text
    body: _LongText
    attributes: _LongText
    resource: _Text
    scope_json: _Text
    flags: _Long
    dropped_attributes: _Long
    rollout_id: _Text | None
    received_ns: _Long
    untrusted: _Flag


class EvaluationRow(NamedTuple):
    """A row of `stored.evaluations`."""

    seq: _Long
    key: _Hash
    """Hash of the evaluation id, else of the content; unique except for superseded rows."""
    on_span: _Flag
    """It is a span event, else a log record."""
    trace_id: _Text | None
    span_id: _Text | None
    rollout_id: _Text | None
    """Its own attribute, else its span's."""
    attempt: _Number | None
    name: _Text | None
    score: _Real | None
    label: _Text | None
    explanation: _Text | None
    source: _Text | None
    of_item: _Text | None
    """`trainspan.evaluation.of`."""
    time_ns: _Long
    untrusted: _Flag
    received_ns: _Long
    last_call: _Text | None
    """Span id of the model call that had come back last, if its sender knows."""
    about_response: _Text | None
    """The response that it is about, if it says so."""


TABLES: Final = {"spans": SpanRow, "logs": LogRow, "evaluations": EvaluationRow}
"""Table in the schema `stored` → its rows."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a stored table."""

    name: str
    sql_type: str
    """DuckDB's name of the type."""
    compression: str | None

    @property
    def definition(self) -> str:
        """Its part of CREATE TABLE."""
        return f"{self.name} {self.sql_type}" + (f" USING COMPRESSION {self.compression}" if self.compression else "")


def columns(row: type) -> tuple[Column, ...]:
    """The columns of a row type of TABLES, in order."""
    return tuple(_column(name, hint) for name, hint in row.__annotations__.items())


def _column(name: str, hint: object) -> Column:
    metadata = getattr(hint, "__metadata__", ()) or get_args(hint)[0].__metadata__  # of X | None, that of X
    return Column(name, metadata[0].sql_type, metadata[0].compression)

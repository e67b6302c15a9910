"""The rows of the stored tables, and their columns as Arrow.

Field names and order match the tables in schema.sql (a test compares them).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import pyarrow as pa

from trainspan_collector.rows.tokens import packed_lists

__all__ = ["ROW_GROUP_ROWS", "EvaluationRow", "LogRow", "SpanRow", "evaluation_table", "log_table", "span_table"]

ROW_GROUP_ROWS: Final = 2048
"""An insert of whole row groups is compressed into the file directly: it bypasses the write-ahead log and the next checkpoint,
which halves its cost. Rows are wide, so groups are small: 2,048 call spans are 16 MiB."""


class SpanRow(NamedTuple):
    """A row of `stored.spans`; token columns are packed, 4 bytes per item."""

    seq: int
    span_key: int
    richness: int
    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status_code: int
    status_message: str
    service_name: str | None
    scope_name: str
    scope_json: str
    attributes: str
    resource: str
    events: str
    links: str
    trace_state: str
    flags: int
    dropped_attributes: int
    dropped_events: int
    dropped_links: int
    rollout_id: str | None
    attempt: int | None
    task_id: str | None
    run_id: str | None
    round: int | None
    split: str | None
    agent: str | None
    rollout_status: str | None
    rollout_boundary: str | None
    rollout_judge: str | None
    rollout_calls: int | None
    is_call: bool
    call_index: int | None
    policy_name: str | None
    policy_version: int | None
    prompt_ids: bytes | None
    completion_ids: bytes | None
    logprobs: bytes | None
    finish_reason: str | None
    delivered: bool | None
    untrusted: bool
    received_ns: int
    operation: str | None
    request_model: str | None
    response_id: str | None
    state_key: str | None
    policy_version_spans: str | None
    redacted: str | None
    call_facts: str | None
    attribute_keys: str
    own_reward: bool | None


class LogRow(NamedTuple):
    """A row of `stored.logs`."""

    seq: int
    content_hash: bytes
    time_ns: int
    observed_ns: int
    trace_id: str | None
    span_id: str | None
    event_name: str | None
    severity: int
    severity_text: str
    body: str
    attributes: str
    resource: str
    scope_json: str
    flags: int
    dropped_attributes: int
    rollout_id: str | None
    received_ns: int
    untrusted: bool


class EvaluationRow(NamedTuple):
    """A row of `stored.evaluations`."""

    seq: int
    key: bytes
    on_span: bool
    trace_id: str | None
    span_id: str | None
    rollout_id: str | None
    attempt: int | None
    name: str | None
    score: float | None
    label: str | None
    explanation: str | None
    source: str | None
    of_item: str | None
    time_ns: int
    untrusted: bool
    received_ns: int


_TOKEN_ITEMS: Final[Mapping[str, pa.DataType]] = {
    "prompt_ids": pa.int32(),
    "completion_ids": pa.int32(),
    "logprobs": pa.float32(),
}
_UNSIGNED: Final = frozenset({"span_key"})
_ARROW_TYPES: Final[Mapping[type, pa.DataType]] = {
    int: pa.int64(),
    str: pa.string(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    float: pa.float64(),
}


def span_table(rows: Sequence[SpanRow]) -> pa.Table:
    return _table(SpanRow, rows)


def log_table(rows: Sequence[LogRow]) -> pa.Table:
    return _table(LogRow, rows)


def evaluation_table(rows: Sequence[EvaluationRow]) -> pa.Table:
    return _table(EvaluationRow, rows)


def _table(row_type: type[tuple[object, ...]], rows: Iterable[tuple[object, ...]]) -> pa.Table:
    columns = zip(row_type.__annotations__.items(), zip(*rows, strict=True), strict=True)
    return pa.table({name: _column(name, hint, list(values)) for (name, hint), values in columns})


def _column(name: str, hint: type, values: list[Any]) -> pa.Array:
    if name in _TOKEN_ITEMS:
        return packed_lists(values, _TOKEN_ITEMS[name])
    required, *_ = get_args(hint) or (hint,)
    return pa.array(values, pa.uint64() if name in _UNSIGNED else _ARROW_TYPES[required])

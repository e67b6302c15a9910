"""The public SQL views of the store, stable across store versions.

Ids are lower-case hex, times are BIGINT nanoseconds since the epoch; each item has exactly one row.
`attributes`, `resource`, `events` and `links` are JSON text that keeps types: string, bool and double as in JSON,
64-bit integers as JSON integers, bytes as {"bytes": base64}, doubles that JSON lacks as {"double": "NaN"},
arrays as arrays, key-value lists as {"kvlist": [[k, v], …]}.
Token attributes with their own columns are not repeated in `attributes`.
`untrusted` is true for items sent with a token of the role `agent`, if the collector requires tokens.
"""

from typing import Final

from trainspan_schemas.store.tables import EvaluationRow, LogRow, SpanRow, columns
from trainspan_schemas.telemetry import keys

__all__ = ["CALL_FACTS", "IDENTITY", "STORE_VERSION", "VIEWS"]

STORE_VERSION: Final = 9
"""Version of the tables under the views; kept in the store's `meta` table."""

CALL_FACTS: Final = (
    *(keys.CHOICE_INDEX, keys.GEN_AI_TEMPERATURE, keys.GEN_AI_TOP_P, keys.GEN_AI_TOP_K, keys.GEN_AI_MIN_P),
    *(keys.GEN_AI_FREQUENCY_PENALTY, keys.GEN_AI_PRESENCE_PENALTY, keys.GEN_AI_REPETITION_PENALTY),
    *(keys.LOGPROBS_MODE, keys.SAMPLING_CONSTRAINED, keys.CALL_INTERNAL, keys.CALL_MULTIMODAL, keys.NO_BOUNDARY),
    *(keys.CALL_FORCED, keys.CALL_SAME_CLOCK),
    *(keys.CALL_SERVER, keys.CALL_SIGNED, keys.POLICY_BASE, keys.SAMPLING_CONSTRAINT, keys.CONSTRAINT_START),
)
"""Attributes of a call in the column `call_facts` of the reads `spans` and `calls`, in this order."""

IDENTITY: Final = ("seq", "trace_id", "span_id", "rollout_id", "attempt", "task_id", "run_id", "round", "split")
"""Columns of a call that are completed from its trace and its rollout; the others are those of its own row."""


def _of(row: type, *names: str) -> dict[str, str]:
    """Columns of a stored row with their types."""
    types = {column.name: column.sql_type for column in columns(row)}
    return {name: types[name] for name in names}


VIEWS: Final[dict[str, dict[str, str]]] = {
    "spans": _of(
        SpanRow,
        *("seq", "trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns", "status_code"),
        *("status_message", "service_name", "scope_name", "attributes", "resource", "events", "links", "trace_state"),
        *("flags", "dropped_attributes", "dropped_events", "dropped_links", "untrusted"),
    ),
    "logs": _of(
        LogRow,
        *("seq", "time_ns", "trace_id", "span_id", "event_name", "severity", "body", "attributes", "resource"),
        "untrusted",
    ),
    "calls": _of(
        SpanRow,
        *IDENTITY,
        *("agent", "call_index", "policy_name", "policy_version", "prompt_ids", "completion_ids", "logprobs"),
        *("finish_reason", "delivered", "start_ns", "end_ns", "untrusted"),
    ),
    "evaluations": _of(
        EvaluationRow,
        *("seq", "trace_id", "span_id", "rollout_id", "name", "score", "label", "explanation", "source", "time_ns"),
        "untrusted",
    ),
    "rollouts": {
        **_of(SpanRow, "rollout_id", "attempt", "trace_id", "task_id", "run_id", "round", "split"),
        "status": "VARCHAR",
        "reward": "DOUBLE",
        "n_calls": "INTEGER",
        **_of(SpanRow, "start_ns", "end_ns", "untrusted"),
    },
}
"""View name → column name → DuckDB type, in order."""

"""The public SQL views of the store, stable across store versions.

Ids are lower-case hex, times are BIGINT nanoseconds since the epoch; each item has exactly one row.
`attributes`, `resource`, `events` and `links` are JSON text that keeps types: string, bool and double as in JSON,
64-bit integers as JSON integers, bytes as {"bytes": base64}, doubles that JSON lacks as {"double": "NaN"},
arrays as arrays, key-value lists as {"kvlist": [[k, v], …]}.
Token attributes with their own columns are not repeated in `attributes`.
`untrusted` is true for items sent with a token of the role `agent`, if the collector requires tokens.
"""

from typing import Final

from trainspan_schemas import keys

__all__ = ["CALL_FACTS", "STORE_VERSION", "VIEWS"]

STORE_VERSION: Final = 7
"""Version of the tables under the views; kept in the store's `meta` table."""

CALL_FACTS: Final = (
    *(keys.CHOICE_INDEX, keys.GEN_AI_TEMPERATURE, keys.GEN_AI_TOP_P, keys.GEN_AI_TOP_K, keys.GEN_AI_MIN_P),
    *(keys.GEN_AI_FREQUENCY_PENALTY, keys.GEN_AI_PRESENCE_PENALTY, keys.GEN_AI_REPETITION_PENALTY),
    *(keys.LOGPROBS_MODE, keys.SAMPLING_CONSTRAINED, keys.CALL_INTERNAL, keys.CALL_MULTIMODAL, keys.NO_BOUNDARY),
    *(keys.CALL_SERVER, keys.CALL_SIGNED, keys.POLICY_BASE, keys.SAMPLING_CONSTRAINT, keys.CONSTRAINT_START),
)
"""Attributes of a call in the column `call_facts` of the reads `spans` and `calls`, in this order."""

VIEWS: Final[dict[str, dict[str, str]]] = {
    "spans": {
        "seq": "BIGINT",
        "trace_id": "VARCHAR",
        "span_id": "VARCHAR",
        "parent_span_id": "VARCHAR",
        "name": "VARCHAR",
        "kind": "INTEGER",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        "status_code": "INTEGER",
        "status_message": "VARCHAR",
        "service_name": "VARCHAR",
        "scope_name": "VARCHAR",
        "attributes": "VARCHAR",
        "resource": "VARCHAR",
        "events": "VARCHAR",
        "links": "VARCHAR",
        "trace_state": "VARCHAR",
        "flags": "BIGINT",
        "dropped_attributes": "BIGINT",
        "dropped_events": "BIGINT",
        "dropped_links": "BIGINT",
        "untrusted": "BOOLEAN",
    },
    "logs": {
        "seq": "BIGINT",
        "time_ns": "BIGINT",
        "trace_id": "VARCHAR",
        "span_id": "VARCHAR",
        "event_name": "VARCHAR",
        "severity": "INTEGER",
        "body": "VARCHAR",
        "attributes": "VARCHAR",
        "resource": "VARCHAR",
        "untrusted": "BOOLEAN",
    },
    "calls": {
        "seq": "BIGINT",
        "trace_id": "VARCHAR",
        "span_id": "VARCHAR",
        "rollout_id": "VARCHAR",
        "attempt": "INTEGER",
        "task_id": "VARCHAR",
        "run_id": "VARCHAR",
        "round": "INTEGER",
        "split": "VARCHAR",
        "agent": "VARCHAR",
        "call_index": "INTEGER",
        "policy_name": "VARCHAR",
        "policy_version": "INTEGER",
        "prompt_ids": "INTEGER[]",
        "completion_ids": "INTEGER[]",
        "logprobs": "FLOAT[]",
        "finish_reason": "VARCHAR",
        "delivered": "BOOLEAN",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        "untrusted": "BOOLEAN",
    },
    "evaluations": {
        "seq": "BIGINT",
        "trace_id": "VARCHAR",
        "span_id": "VARCHAR",
        "rollout_id": "VARCHAR",
        "name": "VARCHAR",
        "score": "DOUBLE",
        "label": "VARCHAR",
        "explanation": "VARCHAR",
        "source": "VARCHAR",
        "time_ns": "BIGINT",
        "untrusted": "BOOLEAN",
    },
    "rollouts": {
        "rollout_id": "VARCHAR",
        "attempt": "INTEGER",
        "trace_id": "VARCHAR",
        "task_id": "VARCHAR",
        "run_id": "VARCHAR",
        "round": "INTEGER",
        "split": "VARCHAR",
        "status": "VARCHAR",
        "reward": "DOUBLE",
        "n_calls": "INTEGER",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        "untrusted": "BOOLEAN",
    },
}
"""View name → column name → DuckDB type, in order."""

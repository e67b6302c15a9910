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
from trainspan_schemas.telemetry.status import ROLLOUT_STATUSES

__all__ = ["CALL_FACTS", "IDENTITY", "MEANINGS", "STORE_VERSION", "VIEWS"]

STORE_VERSION: Final = 10
"""Version of the tables under the views; kept in the store's `meta` table."""

CALL_FACTS: Final = (
    *(keys.CHOICE_INDEX, keys.GEN_AI_TEMPERATURE, keys.GEN_AI_TOP_P, keys.GEN_AI_TOP_K, keys.GEN_AI_MIN_P),
    *(keys.GEN_AI_FREQUENCY_PENALTY, keys.GEN_AI_PRESENCE_PENALTY, keys.GEN_AI_REPETITION_PENALTY),
    *(keys.LOGPROBS_MODE, keys.SAMPLING_CONSTRAINED, keys.CALL_INTERNAL, keys.CALL_MULTIMODAL, keys.NO_BOUNDARY),
    *(keys.CALL_FORCED, keys.CALL_SAME_CLOCK),
    *(keys.CALL_SERVER, keys.CALL_SIGNED, keys.POLICY_BASE, keys.SAMPLING_CONSTRAINT, keys.CONSTRAINT_START),
    *(keys.CALL_KIND, keys.CALL_KIND_RULE),
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
        *(
            "seq",
            "trace_id",
            "span_id",
            "parent_span_id",
            "rollout_id",
            "name",
            "kind",
            "start_ns",
            "end_ns",
            "status_code",
        ),
        *("status_message", "service_name", "scope_name", "attributes", "resource", "events", "links", "trace_state"),
        *("flags", "dropped_attributes", "dropped_events", "dropped_links", "untrusted"),
    ),
    "logs": _of(
        LogRow,
        *(
            "seq",
            "time_ns",
            "trace_id",
            "span_id",
            "rollout_id",
            "event_name",
            "severity",
            "body",
            "attributes",
            "resource",
        ),
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

_EVERYWHERE: Final = {
    "seq": "number of the row, in the order of storing; unique in the store",
    "trace_id": "32 hex digits",
    "span_id": "16 hex digits",
    "rollout_id": "its rollout: its own attribute, else that of its trace if the trace has exactly one; else NULL",
    "attempt": "number of the attempt, from 0",
    "task_id": "id of the task; NULL outside the runner",
    "run_id": "id of the run",
    "round": "number of the round, from 0",
    "split": "`train` or `val`",
    "start_ns": "start, in ns since 1970",
    "end_ns": "end, in ns since 1970",
    "attributes": "JSON object",
    "resource": "JSON object: attributes of the process that sent it",
    "untrusted": "whether its sender may not state this (role `agent`)",
}
MEANINGS: Final[dict[str, dict[str, str]]] = {
    "spans": _EVERYWHERE
    | {
        "parent_span_id": "16 hex digits; NULL for the root of a trace",
        "name": "such as `chat policy`, `execute_tool add`",
        "kind": "0 unspecified, 1 internal, 2 server, 3 client, 4 producer, 5 consumer",
        "status_code": "0 unset, 1 ok, 2 error",
        "status_message": "the text of an error",
        "service_name": "`service.name` of the resource",
        "scope_name": "the instrumentation",
        "events": "JSON array of `{name, time_ns, dropped_attributes, attributes}`",
        "links": "JSON array of `{trace_id, span_id, trace_state, flags, dropped_attributes, attributes}`",
        "trace_state": "W3C `tracestate`",
        "flags": "W3C trace flags, and OTLP's flag on a remote parent",
        **{
            f"dropped_{what}": f"number of {what} that the sender dropped" for what in ("attributes", "events", "links")
        },
    },
    "logs": _EVERYWHERE
    | {
        "time_ns": "time of the event, in ns since 1970",
        "span_id": "of the span that it was recorded in; NULL outside one",
        "event_name": "such as `gen_ai.evaluation.result`",
        "severity": "OTLP's number, 1 to 24; 0 if not stated",
        "body": "JSON value",
    },
    "calls": _EVERYWHERE
    | {
        "agent": "name of the agent that the call states",
        "call_index": "its number in the rollout, from 0; the choices of one request share it",
        "policy_name": "name of the policy, or of the adapter that the client asked for",
        "policy_version": "version of the weights; the oldest one if tokens are of several",
        "prompt_ids": "(P,) token ids of the prompt",
        "completion_ids": "(C,) token ids of the answer, with the one that ended it",
        "logprobs": "(C,) log-probability of each sampled token, in nats",
        "finish_reason": "`stop`, `length`, `tool_calls`, `abort`, …",
        "delivered": "whether the client received the whole answer",
    },
    "evaluations": _EVERYWHERE
    | {
        "trace_id": "32 hex digits; NULL if a record names its rollout alone",
        "span_id": "of the span that it was recorded on; NULL if there is none",
        "name": "name of the score; `reward` by default",
        "score": "the score; NULL if there is none, as of a label that was taken back",
        "label": "`gen_ai.evaluation.score.label`",
        "explanation": "the reason that the judge or sender gave",
        "source": "`judge`, `return`, `agent`, `human`, or `label` of a person's label",
        "time_ns": "time of the event, in ns since 1970",
    },
    "rollouts": _EVERYWHERE
    | {
        "rollout_id": "id of the rollout",
        "trace_id": "trace of its rollout span",
        "status": ", ".join(f"`{status}`" for status in ROLLOUT_STATUSES),
        "reward": "a person's label (1 good, 0 bad), else the sum of the evaluations `reward` that count for the whole rollout, or NULL",
        "n_calls": "model calls that succeeded as the agent's side saw it; NULL if not stated",
    },
}
"""View → column → its meaning, for docs/columns.md."""

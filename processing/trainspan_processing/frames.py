"""The declared Polars schemas between the stages. Ids are lower-case hex, times nanoseconds since the epoch.

A rollout is keyed by (rollout_id, attempt); a span by (trace_id, span_id).
"""

from typing import Final

import polars as pl

__all__ = [
    "CALLS",
    "EVALUATIONS",
    "PAYLOAD",
    "ROLLOUT_KEY",
    "SPANS",
    "SPAN_KEY",
    "Schema",
    "empty",
]

Schema = dict[str, pl.DataType | type[pl.DataType]]

ROLLOUT_KEY: Final = ["rollout_id", "attempt"]
SPAN_KEY: Final = ["trace_id", "span_id"]

_IDENTITY: Schema = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "task_id": pl.String,
    "run_id": pl.String,
    "round": pl.Int32,
    "split": pl.String,
}

CALLS: Final[Schema] = {
    "store": pl.UInt8,
    "trace_id": pl.String,
    "span_id": pl.String,
    "parent_span_id": pl.String,
    **_IDENTITY,
    "agent": pl.String,
    "call_index": pl.Int32,
    "choice_index": pl.Int32,
    "policy_name": pl.String,
    "policy_version": pl.Int32,
    "policy_version_spans": pl.String,
    "request_model": pl.String,
    "response_id": pl.String,
    "finish_reason": pl.String,
    "delivered": pl.Boolean,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "dropped_attributes": pl.Int64,
    "temperature": pl.Float64,
    "top_p": pl.Float64,
    "top_k": pl.Float64,
    "min_p": pl.Float64,
    "frequency_penalty": pl.Float64,
    "presence_penalty": pl.Float64,
    "repetition_penalty": pl.Float64,
    "logprobs_mode": pl.String,
    "constrained": pl.Boolean,
    "internal": pl.Boolean,
    "multimodal": pl.Boolean,
    "no_boundary": pl.Boolean,
    "state_key": pl.String,
}
"""One row per call span of the policy server, without its tokens. `store` numbers the `--store` it was read from."""

SPANS: Final[Schema] = {
    "store": pl.UInt8,
    "trace_id": pl.String,
    "span_id": pl.String,
    "parent_span_id": pl.String,
    **_IDENTITY,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "failed": pl.Boolean,
    "service_name": pl.String,
    "agent": pl.String,
    "model": pl.String,
    "response_id": pl.String,
    "is_client_call": pl.Boolean,
    "is_agent": pl.Boolean,
    "is_tool": pl.Boolean,
    "tool_signature": pl.UInt64,
    "error_type": pl.String,
    "status": pl.String,
    "boundary": pl.String,
    "stated_calls": pl.Int32,
    "judge": pl.String,
    "evaluation_events": pl.String,
}
"""Every span but the policy server's calls, narrowed. `status` makes it a rollout's own span; `is_client_call` means that a
client's instrumentation describes a model call; `tool_signature` is a hash of a tool step's name and input; `evaluation_events`
is the events' JSON where one is an evaluation."""

EVALUATIONS: Final[Schema] = {
    "trace_id": pl.String,
    "span_id": pl.String,
    "rollout_id": pl.String,
    "name": pl.String,
    "score": pl.Float64,
    "source": pl.String,
    "time_ns": pl.Int64,
    "response_id": pl.String,
}
"""One row per evaluation. `response_id` is set on late feedback that named its call by the response alone."""

PAYLOAD: Final[Schema] = {
    "trace_id": pl.String,
    "span_id": pl.String,
    "prompt_ids": pl.List(pl.Int32),
    "completion_ids": pl.List(pl.Int32),
    "logprobs": pl.List(pl.Float32),
}
"""The tokens of calls: P prompt ids, C completion ids, C log-probabilities."""


def empty(schema: Schema) -> pl.DataFrame:
    """A frame without rows."""
    return pl.DataFrame(schema=schema)

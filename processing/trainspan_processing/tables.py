"""The declared Polars schemas between the stages. Ids are lower-case hex, times nanoseconds since the epoch.

A rollout is keyed by (rollout_id, attempt); a span by (trace_id, span_id).
"""

from typing import Final

import polars as pl

__all__ = [
    "CALLS",
    "COLLISIONS",
    "EDGES",
    "EVALUATIONS",
    "HISTORY",
    "ROLLOUT_KEY",
    "SPANS",
    "SPAN_KEY",
    "TOKENS",
    "Schema",
    "compact",
    "each_once",
    "empty",
    "once_each",
]

Schema = dict[str, pl.DataType | type[pl.DataType]]

_HALVES: Final = ((2, 3), (4, 5))
"""Kinds SERVER and CLIENT, PRODUCER and CONSUMER: client and server may share a span as two halves."""

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
    "seq": pl.Int64,
    "trace_id": pl.String,
    "span_id": pl.String,
    "parent_span_id": pl.String,
    **_IDENTITY,
    "agent": pl.String,
    "call_index": pl.Int32,
    "server": pl.String,
    "choice_index": pl.Int32,
    "policy_name": pl.String,
    "base": pl.String,
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
    "obstacle": pl.String,
    "sampling_unstated": pl.Boolean,
    "internal": pl.Boolean,
    "forced": pl.Boolean,
    "same_clock": pl.Boolean,
    "multimodal": pl.Boolean,
    "call_kind": pl.String,
    "call_kind_rule": pl.String,
    "has_tools": pl.Boolean,
    "no_boundary": pl.Boolean,
    "state_key": pl.String,
    "redacted": pl.Boolean,
    "untrusted": pl.Boolean,
    "is_signed": pl.Boolean,
    "received_ns": pl.Int64,
    "tokens_source": pl.String,
    "n_tokens": pl.UInt32,
}
"""One row per call with tokens, without the tokens themselves: `n_tokens` counts tokens of prompt and answer. `store` is the
number of the `--store` that it was read from and `seq` its place there, NULL if no call span contains the tokens. `obstacle` is
the reason for dropping a constrained call, NULL if its constraint can be replayed. `same_clock`: the agent is on the server's
machine. `call_kind` is what the request shows (agents/call_kinds.py), by `call_kind_rule`. `has_tools`: its answer calls
tools, or its request brings their results. `received_ns` is the time by the
collector's clock when the row came. `tokens_source` is `engine` for call spans of the policy server, `response` for responses kept
by a client's instrumentation (traces/client_calls.py)."""

SPANS: Final[Schema] = {
    "store": pl.UInt8,
    "seq": pl.Int64,
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
    "is_generation": pl.Boolean,
    "is_bare_call": pl.Boolean,
    "redacted": pl.Boolean,
    "has_answer": pl.Boolean,
    "has_prompt": pl.Boolean,
    "is_agent": pl.Boolean,
    "is_tool": pl.Boolean,
    "error_type": pl.String,
    "status": pl.String,
    "boundary": pl.String,
    "stated_calls": pl.Int32,
    "judge": pl.String,
    "group_size": pl.Int32,
    "served_calls": pl.Int32,
    "is_signed": pl.Boolean,
    "own_reward": pl.Boolean,
    "untrusted": pl.Boolean,
    "is_request": pl.Boolean,
    "last_call": pl.String,
    "received_ns": pl.Int64,
}
"""Every span except calls with tokens, with the needed columns only. A `status` marks a rollout's own span, on which
`group_size` is the number of rollouts that its runner makes of the task, and `served_calls` that of the calls that the policy servers
began, as they told the runner. `is_client_call`: a client's instrumentation
describes a model call; `is_generation`: by Langfuse's word alone;
`has_answer`: it contains the raw response with token ids. `is_bare_call`: a call of the policy server
without token ids. `has_prompt`: it may have recorded a system prompt. `is_signed`: of a rollout's own span, its runner signed what
it passed on; of a bare call, its caller had that signature.
`seq` is the span's number in its store. `is_request`: a client's span of an HTTP request. `last_call` is the span id of
the call that had come back last in the agent's process when the span began."""

EVALUATIONS: Final[Schema] = {
    "trace_id": pl.String,
    "span_id": pl.String,
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "of": pl.String,
    "on_span": pl.Boolean,
    "untrusted": pl.Boolean,
    "name": pl.String,
    "score": pl.Float64,
    "source": pl.String,
    "time_ns": pl.Int64,
    "last_call": pl.String,
    "about_response": pl.String,
    "response_id": pl.String,
}
"""One row per evaluation. `of` is its stated subject, `on_span` means that it is a span event. `last_call` is the span id of
the call that had come back last in the agent's process, `about_response` the response that it names; `response_id` is set on
late feedback that identifies its call only by the response."""

TOKENS: Final[Schema] = {
    "trace_id": pl.String,
    "span_id": pl.String,
    "prompt_ids": pl.List(pl.Int32),
    "completion_ids": pl.List(pl.Int32),
    "logprobs": pl.List(pl.Float32),
    "constraint": pl.String,
    "constraint_start": pl.Int32,
}
"""The tokens of calls: P prompt ids, C completion ids, C log-probabilities; and their constraint, if recorded."""


HISTORY: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "run_id": pl.String,
    "judge": pl.String,
    "end_ns": pl.Int64,
    "part": pl.String,
    "value": pl.Float64,
}
"""Values of rollouts of earlier datasets. `part` is "" for the whole rollout, else the agent's or reward's share, or with
`step` the mean over its calls of one turn or agent. `judge`: whose verdict it is; NULL: the agent's, or a reward function's."""


EDGES: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "rule": pl.String,
    "call_trace_id": pl.String,
    "call_span_id": pl.String,
    "name": pl.String,
    "score": pl.Float64,
    "source": pl.String,
    "time_ns": pl.Int64,
}
"""One row per reward: `rule` is the binding rule; call_trace_id and call_span_id are NULL if it rewards the rollout."""


COLLISIONS: Final[Schema] = {"trace_id": pl.String, "untrusted": pl.Boolean}
"""Traces in which distinct spans have the same ids, as programs make them that seed the source of their ids. `untrusted`: whether
all of these spans are. Which of them is the parent of another, or has which reward, is then unknown in the whole trace."""


def compact(frame: pl.DataFrame) -> pl.DataFrame:
    """The same frame with copied strings: Polars keeps a whole text in memory for every slice of it."""
    copied = pl.from_arrow(frame.to_arrow(compat_level=pl.CompatLevel.oldest()))
    assert isinstance(copied, pl.DataFrame)
    return copied


def each_once(spans: pl.DataFrame) -> pl.DataFrame:
    """The rows in their order, each SPAN_KEY once: the first trusted row, else the first.

    Within a store the collector keeps the trusted one of several spans with one key; the copies of an agent that sends its own
    under the runner's key to another store come here.
    """
    if spans["span_id"].n_unique() == spans.height:  # span ids are random, and checking one column is fast
        return spans
    ranked = spans.with_row_index("_place").sort(pl.col("untrusted").fill_null(value=False), "_place")
    return ranked.unique(SPAN_KEY, keep="first", maintain_order=True).sort("_place").drop("_place")


def once_each(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`spans` (SPANS with `kind`, or CALLS), each SPAN_KEY once, and COLLISIONS of distinct spans that share one.

    Within a store the collector tells them apart from copies of one span and marks them; spans in two stores are compared here, by
    its rules (collector/rows/same_span.py).
    """
    once = each_once(spans)
    if once.height == spans.height:
        return once, empty(COLLISIONS)
    same = spans.filter(pl.struct(SPAN_KEY).is_duplicated()).with_columns(pl.col("untrusted").fill_null(value=False))
    # A span of less standing gives way to another one.
    is_runners, half = pl.lit(value=False), pl.lit(None, dtype=pl.Int64)
    if "kind" in same.columns:
        is_runners = ((pl.col("boundary") == "runner") & pl.col("status").is_not_null()).fill_null(value=False)
        kind, alike = pl.col("kind").fill_null(0), [*SPAN_KEY, "untrusted"]
        lowest, highest = kind.min().over(alike), kind.max().over(alike)
        are_halves = pl.any_horizontal((lowest == low) & (highest == high) for low, high in _HALVES)
        half = pl.when(are_halves).then(kind)
    stated = pl.when(pl.col("rollout_id").is_not_null()).then(pl.struct("rollout_id", pl.col("attempt").fill_null(0)))
    facts = (pl.col("start_ns") // 1000, pl.col("parent_span_id"), stated.drop_nulls())
    several = same.group_by(*SPAN_KEY, "untrusted", is_runners.alias("is_runners"), half.alias("half")).agg(
        pl.any_horizontal(fact.n_unique() > 1 for fact in facts).alias("are_distinct")
    )
    return once, several.filter("are_distinct").select(*COLLISIONS).unique()


def empty(schema: Schema) -> pl.DataFrame:
    """A frame without rows."""
    return pl.DataFrame(schema=schema)

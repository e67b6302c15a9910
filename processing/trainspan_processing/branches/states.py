"""The states of stored rollouts: one before each request of the agent, with what decides whether branches can begin there.

State `call` is the one before request `call`, from 0; a rollout of K requests ends in state K.
"""

from collections.abc import Iterator
from typing import Final

import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.read.tokens import chunks_of_rollouts, read_tokens
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, Schema
from trainspan_processing.traces.server_calls import request_key
from trainspan_schemas.telemetry.prefix import FINISH_REASONS

__all__ = ["GREEDY", "IMAGES", "STATES", "request_position", "states_of"]

GREEDY: Final = "greedy: all calls from there on have temperature 0, so that branches would be equal"
IMAGES: Final = "images in the prompt there"
_GREEDY_BELOW: Final = 1e-5
"""Temperature below which vLLM takes the most likely token."""

STATES: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "call": pl.Int32,
    "trace_id": pl.String,
    "span_id": pl.String,
    "agent": pl.String,
    "call_kind": pl.String,
    "policy_version": pl.Int32,
    "surprisal": pl.Float64,
    "answered_s": pl.Float64,
    "can_repeat": pl.Boolean,
    "obstacle": pl.String,
}
"""One row per request, in order. trace_id and span_id are those of its first choice. `surprisal` is the mean of −log p of the
tokens that were sampled, in nats. `answered_s`: seconds in which calls before it were being answered. `can_repeat`: the server
can repeat its answers. `obstacle`: why no branch can begin there, else NULL."""


def states_of(source: Source, calls: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """STATES of the rollouts of `calls` (CALLS of a trace index, in its order)."""
    numbered = calls.with_columns(request_position().over(ROLLOUT_KEY).alias("call"))
    scored = [
        part.join(_minus_logs(tokens), on=SPAN_KEY, how="left", maintain_order="left")
        for part, tokens in _with_tokens(source, numbered, answers)
    ]
    nothing = pl.DataFrame(schema={**numbered.schema, "minus_logs": pl.Float64, "sampled": pl.UInt32})
    return (
        pl.concat([nothing, *scored])
        .group_by(*ROLLOUT_KEY, "call", maintain_order=True)
        .agg(
            pl.col("trace_id", "span_id", "agent", "call_kind", "policy_version").first(),
            (pl.col("minus_logs").sum() / pl.col("sampled").sum()).alias("surprisal"),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            _can_repeat().all().alias("can_repeat"),
            pl.col("multimodal").fill_null(False).any().alias("has_images"),
            (pl.col("temperature") < _GREEDY_BELOW).fill_null(False).all().alias("is_greedy"),
        )
        .with_columns(_obstacle().alias("obstacle"), _answered_s().alias("answered_s"))
        .select(pl.col(name).cast(kind) for name, kind in STATES.items())
    )


def request_position() -> pl.Expr:
    """The position of each call's request among those of a rollout, from 0; choices of one request share it. For CALLS in order."""
    return request_key().rle_id().cast(pl.Int32)


def _with_tokens(
    source: Source, calls: pl.DataFrame, answers: pl.DataFrame
) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
    for part in chunks_of_rollouts(calls):
        yield part, read_tokens(source, part, (*SPAN_KEY, "logprobs"), answers)


def _minus_logs(tokens: pl.DataFrame) -> pl.DataFrame:
    """trace_id, span_id, `minus_logs` (the sum of −log p) and `sampled` (the number of tokens)."""
    logprobs = pl.col("logprobs").cast(pl.List(pl.Float64))
    return tokens.select(*SPAN_KEY, (-logprobs.list.sum()).alias("minus_logs"), logprobs.list.len().alias("sampled"))


def _obstacle() -> pl.Expr:
    """Branches are compared with the stored prompt, which says nothing of images, and samples of one answer are no evidence."""
    only_greedy = pl.col("is_greedy").reverse().cum_min().reverse().over(ROLLOUT_KEY)
    return pl.when("has_images").then(pl.lit(IMAGES)).when(only_greedy).then(pl.lit(GREEDY))


def _answered_s() -> pl.Expr:
    """The time that calls before each state took, once where they overlap."""
    earlier = pl.col("end_ns").cum_max().shift(1).over(ROLLOUT_KEY)
    added = (pl.col("end_ns") - pl.max_horizontal("start_ns", earlier)).clip(0)
    return (added.cum_sum().over(ROLLOUT_KEY) - added) / 1e9


def _can_repeat() -> pl.Expr:
    """Whether an answer is whole, was delivered, and depends on nothing but the ids of its prompt."""
    is_whole = pl.col("finish_reason").is_in(list(FINISH_REASONS)) & pl.col("delivered").fill_null(False)
    is_text = ~pl.col("multimodal").fill_null(False)
    return (is_whole & is_text & (pl.col("tokens_source") == "engine") & (pl.col("sampled") > 0)).fill_null(False)

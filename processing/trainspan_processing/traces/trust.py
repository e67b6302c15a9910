"""Decides whose word counts for a rollout: which of its rows are heard, and which evaluations may reward it.

A rollout is vouched for if a trusted sender has sent its own span, or if its runner signed a call of it. Then only trusted rows set
its identity, attempts, calls and times; in a signed rollout the policy server's rows count only if their caller had the signature.
Anyone else may state its id. Rollouts that nobody vouches for are taken as they were sent.

The agent's own evaluations are in the trace that the runner began for this attempt and passed only to this agent, so that no
other rollout's agent can send one. What branches measured is no reward: no agent's evaluation of such a name ever counts, nor does
one that says it is a person's label.
"""

from typing import Final

import polars as pl

from trainspan_processing.tables import Schema
from trainspan_schemas.telemetry import keys

__all__ = [
    "VOUCHED",
    "counted_calls",
    "heard",
    "of_own_traces",
    "vouched_rollouts",
    "with_admitted_rewards",
    "with_own_rewards",
]

VOUCHED: Final[Schema] = {"rollout_id": pl.String, "signs": pl.Boolean}
"""The rollouts that someone vouches for; `signs`: their runner signed what it passed to the agent."""


def vouched_rollouts(spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """VOUCHED from SPANS and CALLS."""
    is_trusted = ~pl.col("untrusted").fill_null(value=False)
    is_runners = (pl.col("boundary") == "runner").fill_null(value=False)
    roots = (
        spans.filter(pl.col("status").is_not_null() & pl.col("rollout_id").is_not_null() & is_trusted)
        .group_by("rollout_id")
        .agg(is_runners.any().alias("has_runner"), (is_runners & pl.col("is_signed")).any().alias("signs"))
    )
    # The runner's own span comes last.
    signed = calls.filter(pl.col("is_signed") & is_trusted & pl.col("rollout_id").is_not_null())
    early = signed.select("rollout_id").unique().join(roots.filter("has_runner"), on="rollout_id", how="anti")
    rest = roots.join(early, on="rollout_id", how="anti").select(*VOUCHED)
    return pl.concat([rest, early.with_columns(pl.lit(value=True).alias("signs"))])


def heard(rows: pl.DataFrame, vouched: pl.DataFrame) -> pl.DataFrame:
    """CALLS, OTHERS or SPANS, in their order, with `is_heard` (they count for their rollout) and `is_unsigned` (their rollout is
    signed, and the policy server's caller had no signature)."""
    is_unsigned = (pl.col("signs") & ~pl.col("is_signed")).fill_null(value=False)
    if "is_bare_call" in rows.columns:
        is_unsigned &= pl.col("is_bare_call")
    is_trusted = ~pl.col("untrusted").fill_null(value=False)
    return (
        rows.join(vouched, on="rollout_id", how="left", maintain_order="left")
        .with_columns(
            is_unsigned.alias("is_unsigned"),
            (pl.col("signs").is_null() | (is_trusted & ~is_unsigned)).alias("is_heard"),
        )
        .drop("signs")
    )


def counted_calls(calls: pl.DataFrame, spans: pl.DataFrame, vouched: pl.DataFrame) -> pl.DataFrame:
    """The CALLS by which a rollout is complete: those that are heard, or the policy server's unsigned ones of an attempt with none.

    A server without the runner's key knows no signature: `admit = "unsigned"` trains such calls, once all of them have arrived.
    """
    if calls["is_heard"].all():
        return calls
    key = ["rollout_id", "attempt"]
    attempts = heard(spans, vouched).filter(pl.col("is_heard") & pl.col("status").is_not_null()).select(key).unique()
    silent = attempts.join(calls.filter("is_heard"), on=key, how="anti").with_columns(
        pl.lit(value=True).alias("is_silent")
    )
    may_count = pl.col("is_silent").fill_null(value=False) & ~pl.col("untrusted").fill_null(value=False)
    located = calls.join(silent, on=key, how="left", maintain_order="left")
    return located.filter(pl.col("is_heard") | may_count).drop("is_silent")


def of_own_traces(spans: pl.DataFrame, calls: pl.DataFrame, vouched: pl.DataFrame) -> pl.DataFrame:
    """SPANS without those that are not heard and are in no trace with a span or one of CALLS of their rollout that is: the agent's own
    steps are in such a trace, whose id no other agent knows."""
    marked = heard(spans, vouched)
    if marked["is_heard"].all():
        return spans
    own_traces = pl.concat([marked.filter("is_heard"), calls], how="diagonal").select("rollout_id", "trace_id").unique()
    known = own_traces.with_columns(pl.lit(value=True).alias("is_own"))
    located = marked.join(known, on=["rollout_id", "trace_id"], how="left", maintain_order="left")
    return located.filter(pl.col("is_heard") | pl.col("is_own")).select(spans.columns)


def with_own_rewards(evaluations: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """EVALUATIONS in which agents' own evaluations are no longer untrusted if their runner left the reward to the agent."""
    own_rewarded = rollouts.filter("own_reward").select(
        "rollout_id", "trace_id", pl.col("attempt").alias("own_attempt")
    )
    if own_rewarded.is_empty():
        return evaluations
    counts = (
        pl.col("own_attempt").is_not_null()
        & (pl.col("attempt").fill_null(pl.col("own_attempt")) == pl.col("own_attempt"))
        & _may_be_rewarded()
    )
    located = evaluations.join(own_rewarded, on=["rollout_id", "trace_id"], how="left", maintain_order="left")
    return located.with_columns(
        pl.when(counts).then("own_attempt").otherwise("attempt").alias("attempt"),
        pl.when(counts).then(pl.lit(False)).otherwise("untrusted").alias("untrusted"),
    ).drop("own_attempt")


def with_admitted_rewards(evaluations: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """EVALUATIONS in which those of rollouts without a runner are no longer untrusted: the user vouches for them."""
    others = rollouts.filter(~pl.col("by_runner")).select("rollout_id", pl.lit(True).alias("is_admitted")).unique()
    return (
        evaluations.join(others, on="rollout_id", how="left", maintain_order="left")
        .with_columns(
            (pl.col("untrusted") & (pl.col("is_admitted").is_null() | ~_may_be_rewarded())).alias("untrusted")
        )
        .drop("is_admitted")
    )


def _may_be_rewarded() -> pl.Expr:
    """Whether it is neither a measurement nor a label."""
    is_measurement = pl.col("name").is_in(list(keys.MEASUREMENTS)).fill_null(value=False)
    return ~is_measurement & (pl.col("source") != keys.LABEL).fill_null(value=True)

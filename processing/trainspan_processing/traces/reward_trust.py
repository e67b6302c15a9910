"""Decides which evaluations may reward a rollout: those of trusted senders, and the agent's own if its runner allows it.

The agent's own evaluations are in the trace that the runner began for this attempt and passed only to this agent, so that no
other rollout's agent can send one. What branches measured is no reward: no agent's evaluation of such a name ever counts.
"""

import polars as pl

from trainspan_schemas.telemetry import keys

__all__ = ["with_admitted_rewards", "with_own_rewards"]


def with_own_rewards(evaluations: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """EVALUATIONS in which agents' own evaluations are no longer untrusted if their runner left the reward to the agent."""
    own = rollouts.filter("own_reward").select("rollout_id", "trace_id", pl.col("attempt").alias("own_attempt"))
    if own.is_empty():
        return evaluations
    counts = (
        pl.col("own_attempt").is_not_null()
        & (pl.col("attempt").fill_null(pl.col("own_attempt")) == pl.col("own_attempt"))
        & _is_no_measurement()
    )
    found = evaluations.join(own, on=["rollout_id", "trace_id"], how="left", maintain_order="left")
    return found.with_columns(
        pl.when(counts).then("own_attempt").otherwise("attempt").alias("attempt"),
        pl.when(counts).then(pl.lit(False)).otherwise("untrusted").alias("untrusted"),
    ).drop("own_attempt")


def with_admitted_rewards(evaluations: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """EVALUATIONS in which those of rollouts without a runner are no longer untrusted: the user vouches for them."""
    others = rollouts.filter(~pl.col("by_runner")).select("rollout_id", pl.lit(True).alias("is_admitted")).unique()
    return (
        evaluations.join(others, on="rollout_id", how="left", maintain_order="left")
        .with_columns(
            (pl.col("untrusted") & (pl.col("is_admitted").is_null() | ~_is_no_measurement())).alias("untrusted")
        )
        .drop("is_admitted")
    )


def _is_no_measurement() -> pl.Expr:
    return ~pl.col("name").is_in(list(keys.MEASUREMENTS)).fill_null(value=False)

"""Which evaluations may reward a rollout: those of a sender that may, and its agent's own if its runner left the reward to it.

The agent's own are those within the trace that the runner began for this attempt and handed to this agent alone, so that no
other rollout's agent can send one.
"""

import polars as pl

__all__ = ["with_admitted_rewards", "with_own_rewards"]


def with_own_rewards(evaluations: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """EVALUATIONS, of which those that agents gave where their runner left it to them are no longer untrusted."""
    own = rollouts.filter("own_reward").select("rollout_id", "trace_id", pl.col("attempt").alias("own_attempt"))
    if own.is_empty():
        return evaluations
    counts = pl.col("own_attempt").is_not_null() & (
        pl.col("attempt").fill_null(pl.col("own_attempt")) == pl.col("own_attempt")
    )
    found = evaluations.join(own, on=["rollout_id", "trace_id"], how="left", maintain_order="left")
    return found.with_columns(
        pl.when(counts).then("own_attempt").otherwise("attempt").alias("attempt"),
        pl.when(counts).then(pl.lit(False)).otherwise("untrusted").alias("untrusted"),
    ).drop("own_attempt")


def with_admitted_rewards(evaluations: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """EVALUATIONS, of which those of rollouts that no runner began are no longer untrusted: the user vouches for them."""
    others = rollouts.filter(~pl.col("by_runner")).select("rollout_id", pl.lit(True).alias("is_admitted")).unique()
    return (
        evaluations.join(others, on="rollout_id", how="left", maintain_order="left")
        .with_columns((pl.col("untrusted") & pl.col("is_admitted").is_null()).alias("untrusted"))
        .drop("is_admitted")
    )

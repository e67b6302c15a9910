"""The steps of a rollout: its requests. The choices of one request are made at once, and none of them follows another."""

import polars as pl

__all__ = ["with_requests"]


def with_requests(calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `request` (u32): how many requests of its rollout were made up to this call, its own included.

    `calls` are rows of CALLS in order, with `rollout` and `counted_index`. An answer that did not reach the agent, a call
    that asks for a title, and one of our own are no steps: each has the number of the request before it.
    """
    whole = pl.struct("server", "counted_index")
    known = pl.coalesce("response_id", "span_id")
    answered = pl.struct(
        pl.when(pl.col("counted_index").is_not_null()).then(whole),
        pl.when(pl.col("counted_index").is_null()).then(known).alias("known"),
    )
    is_step = pl.col("delivered").fill_null(value=True) & ~pl.col("internal").fill_null(value=False)
    is_step &= (pl.col("call_kind") != "title").fill_null(value=True)
    numbered = calls.with_columns(is_step.alias("_is_step"), answered.alias("_answered"))
    begins = pl.col("_is_step") & (
        pl.struct("rollout", "_is_step", "_answered") != pl.struct("rollout", "_is_step", "_answered").shift(1)
    ).fill_null(value=True)
    numbered = numbered.with_columns(begins.cast(pl.UInt32).alias("request"))
    return numbered.with_columns(pl.col("request").cum_sum().over("rollout")).drop("_is_step", "_answered")

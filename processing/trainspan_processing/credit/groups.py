"""Groups of rollouts to compare, and within them calls from the same state; the steps of a rollout, which are its requests."""

import hashlib
import json
from collections.abc import Iterable
from typing import Final

import polars as pl

from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.server_calls import request_key

__all__ = ["first_calls", "group_id", "hash_answers", "hash_prompts", "with_groups", "with_requests", "with_states"]

_GROUP_KEY: Final = ["run_id", "round", "task_id", "prompt_hash"]


def first_calls(calls: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """The first call (trace_id, span_id) of each of `rollouts`."""
    return (
        calls.join(rollouts.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi", maintain_order="left")
        .unique(ROLLOUT_KEY, keep="first", maintain_order=True)
        .select(*ROLLOUT_KEY, *SPAN_KEY, "store", "seq", "n_tokens")
    )


def hash_prompts(calls: pl.DataFrame, payloads: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """trace_id, span_id, rollout_id, attempt, `prompt_hash` of the prompt ids of `calls`."""
    return _hashed(calls, payloads, "prompt_ids", "prompt_hash")


def hash_answers(calls: pl.DataFrame, payloads: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The same with `answer_hash`, of the sampled ids."""
    return _hashed(calls, payloads, "completion_ids", "answer_hash")


def _hashed(calls: pl.DataFrame, payloads: Iterable[pl.DataFrame], ids: str, name: str) -> pl.DataFrame:
    frames = [
        calls.join(batch.select(*SPAN_KEY, ids), on=SPAN_KEY, how="inner").select(
            *SPAN_KEY, *ROLLOUT_KEY, pl.col(ids).map_elements(_hash_ids, return_dtype=pl.String).alias(name)
        )
        for batch in payloads
    ]
    schema = {"trace_id": pl.String, "span_id": pl.String, "rollout_id": pl.String, "attempt": pl.Int32}
    return pl.concat([pl.DataFrame(schema={**schema, name: pl.String}), *frames]).unique(SPAN_KEY, keep="any")


def _hash_ids(ids: pl.Series) -> str:
    return hashlib.blake2b(ids.to_numpy().astype("<i4").tobytes(), digest_size=8).hexdigest()


def with_groups(rollouts: pl.DataFrame, prompt_hashes: pl.DataFrame) -> pl.DataFrame:
    """Adds `group_id`: a hash of (run, round, task), or of (run, round, first prompt) if there is no task id."""
    hashes = prompt_hashes.select(*ROLLOUT_KEY, "prompt_hash")
    keyed = rollouts.join(hashes, on=ROLLOUT_KEY, how="left", maintain_order="left").with_columns(
        pl.when(pl.col("task_id").is_null()).then("prompt_hash").alias("prompt_hash")
    )
    names = keyed.select(_GROUP_KEY).unique()
    labels = [group_id(*row) for row in names.iter_rows()]
    names = names.with_columns(pl.Series("group_id", labels, dtype=pl.String))
    return keyed.join(names, on=_GROUP_KEY, how="left", nulls_equal=True, maintain_order="left").drop("prompt_hash")


def group_id(run_id: str | None, round_: int | None, task_id: str | None, prompt_hash: str | None = None) -> str:
    """The id of a group; `prompt_hash` only if its rollouts have no task id."""
    key = (run_id, round_, task_id, prompt_hash)
    return hashlib.blake2b(json.dumps(key, ensure_ascii=False).encode(), digest_size=8).hexdigest()


def with_states(calls: pl.DataFrame, prompt_hashes: pl.DataFrame) -> pl.DataFrame:
    """Adds `state` (u64), GiGPO's anchor state (2505.10978): a hash of the attribute `trainspan.state.key`, else of the
    prompt ids."""
    hashes = prompt_hashes.select(*SPAN_KEY, "prompt_hash")
    key = pl.coalesce(pl.format("key:{}", "state_key"), pl.format("prompt:{}", "prompt_hash"))
    return (
        calls.join(hashes, on=SPAN_KEY, how="left", maintain_order="left")
        .with_columns(key.hash().alias("state"))
        .drop("prompt_hash")
    )


def with_requests(calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `request` (u32): how many requests of its rollout were made up to this call, its own included.

    The choices of one request are made at once, and none of them follows another. `calls` are rows of CALLS in order, with
    `rollout` and `counted_index`. An answer that did not reach the agent, a call that asks for a title, and one of our own
    are no steps: each has the number of the request before it.
    """
    is_step = pl.col("delivered").fill_null(value=True) & ~pl.col("internal").fill_null(value=False)
    is_step &= (pl.col("call_kind") != "title").fill_null(value=True)
    numbered = calls.with_row_index("_row").with_columns(is_step.alias("_is_step"), request_key().alias("_key"))
    steps = numbered.filter("_is_step").select(
        "_row",
        pl.struct("rollout", "_key").ne_missing(pl.struct("rollout", "_key").shift(1)).alias("_begins"),
    )
    numbered = numbered.join(steps, on="_row", how="left", maintain_order="left")
    number = pl.col("_begins").fill_null(value=False).cast(pl.UInt32).cum_sum().over("rollout")
    return numbered.with_columns(number.alias("request")).drop("_row", "_is_step", "_key", "_begins")

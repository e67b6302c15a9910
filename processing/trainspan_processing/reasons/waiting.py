"""Finds groups whose last rollouts have not arrived: the other rollouts wait for them for a limited time."""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.dataset.ledger import DatasetLedger
from trainspan_processing.tables import ROLLOUT_KEY

__all__ = ["Groups", "find_groups"]

_GROUP: Final = ["run_id", "round", "task_id"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups for which fewer rollouts have arrived than their runner makes."""

    held_back: pl.DataFrame
    """rollout_id, attempt of the rollouts of waiting groups."""
    waiting: int = 0
    """Number of waiting groups."""
    taken: int = 0
    """Number of groups that have waited long enough and are used as they are."""


def find_groups(rollouts: pl.DataFrame, ledger: DatasetLedger, now_ns: int, wait_s: float) -> Groups:
    """Groups from rollouts with status, split, `group_size`, `pending`, `by_runner`, `is_signed`, end_ns and the columns of _GROUP;
    validation has none. Of a group that a runner makes, only the runner's rollouts count.

    A rollout has arrived if an earlier dataset used it, or if its last attempt has ended, was not a failure that is retried,
    and is not pending. A group waits until `wait_s` after the latest activity of its rollouts.
    """
    rollouts = rollouts.filter((pl.col("split") != "val").fill_null(True))
    is_runners = pl.col("by_runner") | pl.col("is_signed")
    rollouts = rollouts.filter(is_runners | ~is_runners.any().over(_GROUP))
    sized = rollouts.filter(pl.col("group_size").is_not_null() & pl.col("task_id").is_not_null())
    if sized.is_empty():
        return Groups(rollouts.select(ROLLOUT_KEY).clear())
    is_last = pl.col("attempt") == pl.col("attempt").max().over("rollout_id")
    is_final = is_last & ~pl.col("status").is_in(["infra_error", "cancelled"])
    has_arrived = pl.col("status").is_not_null() & ~pl.col("pending") & is_final
    arrived = pl.concat(
        [
            rollouts.filter(has_arrived).select(*_GROUP, "rollout_id"),
            ledger.used.select(pl.col(name).cast(rollouts.schema[name]) for name in (*_GROUP, "rollout_id")),
        ]
    )
    counted = arrived.group_by(_GROUP).agg(pl.col("rollout_id").n_unique().alias("arrived"))
    sizes = sized.group_by(_GROUP).agg(pl.col("group_size").max())
    last_ends = rollouts.group_by(_GROUP).agg(pl.col("end_ns").max().alias("last_end_ns"))
    groups = sizes.join(counted, on=_GROUP, how="left", nulls_equal=True).join(last_ends, on=_GROUP, nulls_equal=True)
    short = groups.filter(pl.col("arrived").fill_null(0) < pl.col("group_size"))
    waits = pl.col("last_end_ns") > now_ns - int(wait_s * 1e9)
    waiting = short.filter(waits)
    held_back = rollouts.join(waiting.select(_GROUP), on=_GROUP, how="semi", nulls_equal=True).select(ROLLOUT_KEY)
    return Groups(held_back, waiting.height, short.height - waiting.height)

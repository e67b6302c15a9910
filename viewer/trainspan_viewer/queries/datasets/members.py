"""The rollouts of a dataset and their groups as frames, which are kept: a published dataset never changes."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from trainspan_processing.credit.groups import group_id
from trainspan_processing.dataset.published import Published
from trainspan_processing.reasons.reason_counts import NO_ROLLOUT
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_schemas.artifacts.dataset import manifest_path

__all__ = [
    "NO_NAME",
    "DatasetMember",
    "Group",
    "as_groups",
    "as_members",
    "members_of",
    "sorted_groups",
    "sorted_rollouts",
]

NO_NAME: Final = "–"
_MOST_DOTS: Final = 64
_MOST_NAMES: Final = 8


@dataclass(frozen=True, slots=True)
class DatasetMember:
    """A rollout of the dataset."""

    rollout_id: str
    attempt: int
    task_id: str | None
    reward: float | None
    calls: int
    kept: int
    reason: str | None
    tokens: int | None
    """Trained tokens; None if no call was kept."""
    agents: Sequence[str]
    """Names of the agents of its rows, NO_NAME for none; at most 8."""
    kinds: Sequence[str]
    """Kinds of its rows."""
    finish: Sequence[str]
    """Finish reasons of its rows, in the same way."""
    dropped: Mapping[str, int]
    """Reason → number of its calls that are no rows."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts that are compared with each other."""

    group_id: str | None
    task_id: str | None
    n: int
    mean: float | None
    spread: float | None
    """Standard deviation of the rewards."""
    kept: int
    reasons: Sequence[str]
    members: Sequence[DatasetMember]
    """At most 64, by reward."""


def members_of(published: Published, *, with_tokens: bool) -> pl.DataFrame:
    """A row per rollout that the dataset saw; `tokens` is NULL unless `with_tokens`, which reads the lengths of all answers."""
    members = _cached(published, "members", _members)
    if not with_tokens:
        return members.with_columns(pl.lit(None, pl.Int64).alias("tokens"))
    tokens = _cached(published, "tokens", _tokens)
    return members.join(tokens, on=ROLLOUT_KEY, how="left", maintain_order="left")


_cache: dict[tuple[Path, int, str], pl.DataFrame] = {}
_lock = threading.Lock()
_KEPT_BYTES: Final = 128 * 2**20
"""Of all kept frames together; one of 100,000 rollouts has about 20 MB."""


def _cached(published: Published, name: str, make: Callable[[Published], pl.DataFrame]) -> pl.DataFrame:
    """What `make` returns; it is kept, since a published dataset never changes."""
    key = (published.path, manifest_path(published.path).stat().st_mtime_ns, name)
    with _lock:
        cached = _cache.get(key)
    if cached is None:
        cached = make(published)
        with _lock:
            _cache[key] = cached
            while len(_cache) > 1 and sum(frame.estimated_size() for frame in _cache.values()) > _KEPT_BYTES:
                _cache.pop(next(iter(_cache)))
    return cached


def _members(published: Published) -> pl.DataFrame:
    """A row per rollout that the dataset saw, with names from its rows; `key` names its group."""
    rows = published.rows([*ROLLOUT_KEY, "group_id", "agent", "call_kind", "finish_reason"])
    names = rows.group_by(ROLLOUT_KEY).agg(
        pl.col("group_id").first().alias("row_group"),
        pl.col("agent").fill_null(NO_NAME).unique(maintain_order=True).alias("agents"),
        pl.col("call_kind").unique(maintain_order=True).alias("kinds"),
        pl.col("finish_reason").fill_null(NO_NAME).unique(maintain_order=True).alias("finish"),
    )
    by_task = pl.concat_str("run_id", "round", "task_id", separator="\n", ignore_nulls=True)
    alone = pl.coalesce("row_group", pl.format("rollout:{}", "rollout_id"))
    return (
        published.ledger()
        .drop("parts", "function_rewards")
        .filter(~pl.col("rollout_id").str.starts_with(NO_ROLLOUT))
        .join(names, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .with_columns(
            pl.when(pl.col("task_id").is_not_null()).then(by_task).otherwise(alone).alias("key"),
            pl.col("agents", "kinds", "finish").fill_null([]),
        )
    )


def _tokens(published: Published) -> pl.DataFrame:
    """Trained tokens of each rollout with rows. This reads all answers."""
    rows = published.rows([*ROLLOUT_KEY, pl.col("completion_ids").list.len().alias("tokens")])
    return rows.group_by(ROLLOUT_KEY).agg(pl.col("tokens").sum().cast(pl.Int64))


def sorted_groups(members: pl.DataFrame, sort: str) -> pl.DataFrame:
    """A row per group, in order."""
    groups = members.group_by("key").agg(
        pl.col("run_id", "round", "task_id", "row_group").first(),
        pl.len().alias("n"),
        pl.col("reward").mean().alias("mean"),
        pl.col("reward").std(ddof=0).alias("spread"),
        pl.col("tokens").sum(),
        pl.col("kept").sum().cast(pl.Int64),
        pl.col("reason").drop_nulls().unique(maintain_order=True).alias("reasons"),
    )
    column, descending = {
        "spread": ("spread", True),
        "reward": ("mean", True),
        "least reward": ("mean", False),
        "tokens": ("tokens", True),
        "task": ("task_id", False),
    }[sort]
    return groups.sort(column, "key", descending=[descending, False], nulls_last=True)


def sorted_rollouts(members: pl.DataFrame, sort: str) -> pl.DataFrame:
    column, descending = {
        "spread": ("reward", True),
        "reward": ("reward", True),
        "least reward": ("reward", False),
        "tokens": ("tokens", True),
        "task": ("task_id", False),
    }[sort]
    return members.sort(column, "rollout_id", descending=[descending, False], nulls_last=True)


def as_groups(table: pl.DataFrame, members: pl.DataFrame) -> list[Group]:
    inside = members.filter(pl.col("key").is_in(table["key"].implode()))
    parts = {str(name): part for (name,), part in inside.partition_by("key", as_dict=True).items()}
    return [
        Group(
            group_id=row["row_group"]
            if row["task_id"] is None
            else group_id(row["run_id"], row["round"], row["task_id"]),
            task_id=row["task_id"],
            n=row["n"],
            mean=row["mean"],
            spread=row["spread"],
            kept=row["kept"],
            reasons=row["reasons"],
            members=as_members(_evenly(parts[row["key"]].sort("reward", "rollout_id", nulls_last=True))),
        )
        for row in table.iter_rows(named=True)
    ]


def _evenly(rows: pl.DataFrame) -> pl.DataFrame:
    """At most `_MOST_DOTS` of the rows, at equal distances, the first and the last among them."""
    if rows.height <= _MOST_DOTS:
        return rows
    return rows[[round(index * (rows.height - 1) / (_MOST_DOTS - 1)) for index in range(_MOST_DOTS)]]


def as_members(rows: pl.DataFrame) -> list[DatasetMember]:
    names = list(DatasetMember.__dataclass_fields__)
    shown = rows.select(names).with_columns(pl.col("agents", "finish").list.head(_MOST_NAMES))
    return [
        DatasetMember(**{**row, "dropped": json.loads(row["dropped"] or "{}")}) for row in shown.iter_rows(named=True)
    ]

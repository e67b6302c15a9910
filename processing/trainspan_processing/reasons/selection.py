"""Selects a dataset's content by split, agent, policy and the user's own filter. Stored runs can be selected from again."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.reasons.drop_reasons import UNSIGNED, UNTRUSTED, UNTRUSTED_REWARD, admitted_reasons
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_processing.traces.rollout_reader import stored_rollouts
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_processing.traces.trust import with_admitted_rewards
from trainspan_schemas.agents.functions import load_function
from trainspan_schemas.artifacts.branches import BRANCH_TASK
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_schemas.telemetry.status import kind_named

__all__ = ["admitted_evaluations", "load_filter", "select"]


_ADMITTED_CALLS: Final = {UNTRUSTED: "untrusted", UNSIGNED: "is_unsigned"}
"""Reason → the column of the calls that count for their rollout if it is admitted."""


def load_filter(name: str) -> Callable[..., Any]:
    """The user's filter function. Raises UsageError or ProcessError if it cannot be used (functions.py)."""
    return load_function(name, "rollout")


def select(source: Source, traces: TraceIndex, settings: DatasetSettings) -> TraceIndex:
    """The index with `selected` on calls and rollouts, `other_policy` on calls, `split` per the settings, and the calls and rewards
    that they admit.

    Raises UsageError for malformed settings, DatasetError if the filter raises.
    """
    rollouts = _with_split(traces.rollouts, settings.split)
    admitted = admitted_reasons(settings.admit)
    calls = traces.calls.with_columns(
        _is_chosen(settings.agents).alias("selected"),
        ~_is_named("policy_name", settings.policies).alias("other_policy"),
        pl.any_horizontal(
            "is_heard", *(pl.col(name) for reason, name in _ADMITTED_CALLS.items() if reason in admitted)
        ).alias("is_heard"),
    )
    counted = calls.filter("is_heard").group_by(ROLLOUT_KEY).agg(pl.len().alias("n_calls"))
    rollouts = rollouts.drop("n_calls").join(counted, on=ROLLOUT_KEY, how="left", maintain_order="left")
    rollouts = rollouts.with_columns(pl.col("n_calls").fill_null(0))
    chosen = replace(traces, rollouts=rollouts, calls=calls, evaluations=admitted_evaluations(traces, settings))
    return chosen if settings.filter is None else _filtered(source, chosen, settings.filter)


def admitted_evaluations(traces: TraceIndex, settings: DatasetSettings) -> pl.DataFrame:
    """EVALUATIONS of the index, in which those that the settings admit are not untrusted."""
    admitted = admitted_reasons(settings.admit)
    evaluations = traces.admitting if UNTRUSTED in admitted else traces.evaluations
    return with_admitted_rewards(evaluations, traces.rollouts) if UNTRUSTED_REWARD in admitted else evaluations


def _is_chosen(agents: str | None) -> pl.Expr:
    """Raises UsageError for an unknown kind."""
    kinds = filter(None, (kind_named(name.strip()) for name in (agents or "").split(",")))
    return _is_named("agent", agents) | pl.col("call_kind").is_in(list(kinds))


def _is_named(column: str, names: str | None) -> pl.Expr:
    if names is None:
        return pl.lit(True)
    wanted = [name.strip() for name in names.split(",")]
    return pl.col(column).is_in(wanted).fill_null(False)


def _with_split(rollouts: pl.DataFrame, split: str) -> pl.DataFrame:
    """`recorded`: unchanged; `all`: all for training; a share: this share of tasks for training, by a hash of their ids.

    Branches belong to the side of the task of their rollout.
    """
    if split == "recorded":
        return rollouts
    if split == "all":
        return rollouts.with_columns(pl.lit("train").alias("split"))
    try:
        share = float(split)
    except ValueError:
        share = -1.0
    if not 0.0 < share < 1.0:
        raise UsageError(f"split = {split!r} is invalid: use recorded, all, or a fraction of the tasks such as 0.9")
    task = pl.col("task_id").str.replace(BRANCH_TASK, "")
    names = rollouts.select(pl.coalesce(task, "rollout_id")).to_series()
    parts = {name: "train" if _fraction(name) < share else "val" for name in names.unique().to_list()}
    return rollouts.with_columns(
        names.replace_strict(list(parts), list(parts.values()), return_dtype=pl.String).alias("split")
    )


def _fraction(text: str) -> float:
    """A number from 0 to 1 that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _filtered(source: Source, traces: TraceIndex, name: str) -> TraceIndex:
    """Sets `selected` to false for rollouts that the user's function rejects."""
    function = load_filter(name)
    left_out = []
    for key, stored in stored_rollouts(source, traces.heard(), traces.rollouts):
        try:
            wanted = function(stored)
        except Exception as error:
            raise DatasetError(
                f"filter {name!r} raised {type(error).__name__}: {error} on rollout {stored.rollout_id}"
            ) from error
        if not isinstance(wanted, bool | np.bool_):
            raise DatasetError(
                f"filter {name!r} returned {wanted!r:.80} for rollout {stored.rollout_id}: it must return True or False"
            )
        if not wanted:
            left_out.append(key)
    without = pl.DataFrame(left_out, schema={"rollout_id": pl.String, "attempt": pl.Int32}, orient="row")
    marked = traces.rollouts.join(
        without.with_columns(pl.lit(False).alias("_wanted")), on=ROLLOUT_KEY, how="left", maintain_order="left"
    )
    rollouts = marked.with_columns(pl.col("_wanted").fill_null(True).alias("selected")).drop("_wanted")
    return replace(traces, rollouts=rollouts)

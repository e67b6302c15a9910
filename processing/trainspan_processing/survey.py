"""The first pass: everything about the selected rollouts but their tokens, and the wait for what is still arriving."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import polars as pl

from .calls import CALL_COLUMNS, narrow_calls, ordered_calls
from .evaluations import (
    EVALUATION_COLUMNS,
    FEEDBACK_QUERY,
    collect_evaluations,
    collect_feedback,
    with_feedback,
)
from .frames import ROLLOUT_KEY, SPAN_KEY
from .ledger import Ledger
from .rollouts import rollout_table
from .source import Selection, Source
from .spans import SPAN_COLUMNS, narrow_spans
from .twins import Twins, find_twins

__all__ = ["Clock", "Survey", "late_calls", "survey_when_settled", "unused"]

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0

_CALLS_OF_NO_ROLLOUT: Final = """
    SELECT c.trace_id, c.span_id, s.parent_span_id, c.rollout_id, c.attempt, c.task_id, c.run_id, c.round, c.split, c.agent,
           c.call_index, c.policy_name, c.policy_version, c.finish_reason, c.delivered, c.start_ns, c.end_ns,
           s.dropped_attributes, s.attributes
    FROM calls c JOIN spans s USING (trace_id, span_id) WHERE c.rollout_id IS NULL"""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, passed in."""

    now_ns: Callable[[], int]
    """Nanoseconds since the epoch."""
    sleep: Callable[[float], None]
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known without the tokens."""

    calls: pl.DataFrame
    """CALLS, ordered, with `position`, `turn`, and `agent` resolved."""
    spans: pl.DataFrame
    """SPANS."""
    evaluations: pl.DataFrame
    """EVALUATIONS."""
    twins: Twins
    rollouts: pl.DataFrame
    """The rollout table (rollouts.py)."""


def unused(source: Source, selection: Selection, ledger: Ledger) -> tuple[Selection, pl.DataFrame]:
    """The selection without rollouts that an earlier dataset used, and the number of calls that each of those has now.

    The second: rollout_id, attempt, `calls` (u32).
    """
    used = ledger.used.select(*ROLLOUT_KEY)
    if used.is_empty():
        return selection, used.with_columns(pl.lit(0, dtype=pl.UInt32).alias("calls"))
    key = {"rollout_id": pl.String, "attempt": pl.Int32}
    frames = [
        batch.select(pl.col(name).cast(kind) for name, kind in key.items()).with_columns(pl.lit(weight).alias("calls"))
        for name, weight in (("calls", 1), ("rollouts", 0))
        for batch in source.read(name, selection, [*SPAN_KEY, *ROLLOUT_KEY] if name == "calls" else ROLLOUT_KEY)
    ]
    if not frames:
        return selection, used.clear().with_columns(pl.lit(0, dtype=pl.UInt32).alias("calls"))
    known = (
        pl.concat(frames)
        .filter(pl.col("rollout_id").is_not_null())
        .with_columns(pl.col("attempt").fill_null(0))
        .group_by(ROLLOUT_KEY)
        .agg(pl.col("calls").sum().cast(pl.UInt32))
    )
    fresh = known.join(used, on=ROLLOUT_KEY, how="anti")["rollout_id"].unique().sort()
    return (
        Selection(selection.run_id, selection.round, fresh.to_list()),
        known.join(used, on=ROLLOUT_KEY, how="semi"),
    )


def late_calls(now: pl.DataFrame, ledger: Ledger) -> pl.DataFrame:
    """Used rollouts (rollout_id, attempt) with the number of calls that came `late`: after their dataset was built."""
    counted = ledger.rows.select(*ROLLOUT_KEY, pl.col("calls").alias("counted"))
    return (
        now.join(counted, on=ROLLOUT_KEY)
        .filter(pl.col("calls") > pl.col("counted"))
        .with_columns((pl.col("calls") - pl.col("counted")).alias("late"))
        .select(*ROLLOUT_KEY, "calls", "late")
    )


def survey_when_settled(
    source: Source, selection: Selection, ledger: Ledger, clock: Clock, *, settle_s: float, wait_s: float
) -> Survey:
    """Surveys until no rollout for training is pending, or `wait_s` is over."""
    deadline = clock.now_ns() + int(wait_s * 1e9)
    pause_s = _FIRST_PAUSE_S
    while True:
        survey = _survey(source, selection, ledger, clock.now_ns(), settle_s)
        rollouts = survey.rollouts
        waited_for = (
            rollouts.is_empty()
            or rollouts.filter(
                pl.col("pending") & (pl.col("split") != "val").fill_null(True) & ~pl.col("superseded")
            ).height
        )
        left_s = (deadline - clock.now_ns()) / 1e9
        if not waited_for or left_s <= 0:
            return survey
        clock.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _survey(source: Source, selection: Selection, ledger: Ledger, now_ns: int, settle_s: float) -> Survey:
    spans = narrow_spans(source.read("spans", selection, SPAN_COLUMNS))
    evaluations = collect_evaluations(source.read("evaluations", selection, EVALUATION_COLUMNS))
    feedback = collect_feedback(source.query(FEEDBACK_QUERY))
    batches = source.read("calls", selection, CALL_COLUMNS)
    if selection.rollout_ids is not None and selection.run_id is None and selection.round is None:
        batches = chain(batches, source.query(_CALLS_OF_NO_ROLLOUT))
    calls = ordered_calls(narrow_calls(batches))
    used = ledger.used.select(*ROLLOUT_KEY)
    calls = calls.join(used, on=ROLLOUT_KEY, how="anti", maintain_order="left")
    twins = find_twins(calls, spans)
    rollouts = rollout_table(calls, spans, twins.links, now_ns=now_ns, settle_s=settle_s)
    rollouts = rollouts.join(used, on=ROLLOUT_KEY, how="anti", maintain_order="left")
    evaluations = with_feedback(evaluations, feedback, calls)
    return Survey(_with_agents(calls, twins, rollouts), spans, evaluations, twins, rollouts)


def _with_agents(calls: pl.DataFrame, twins: Twins, rollouts: pl.DataFrame) -> pl.DataFrame:
    """The agent of each call: its own word, the nearest ancestor that names one, the service of the rollout's span.

    `turn` counts the calls of one agent within a rollout from 0; the choices of one response share it.
    """
    first_choice = (pl.col("choice_index") == 0) | pl.col("response_id").is_null()
    return (
        calls.join(twins.calls.select(*SPAN_KEY, "ancestor_agent"), on=SPAN_KEY, how="left", maintain_order="left")
        .join(rollouts.select(*ROLLOUT_KEY, "service_name"), on=ROLLOUT_KEY, how="left", maintain_order="left")
        .with_columns(pl.coalesce("agent", "ancestor_agent", "service_name").alias("agent"))
        .drop("ancestor_agent", "service_name")
        .with_columns((first_choice.cast(pl.Int32).cum_sum().over(*ROLLOUT_KEY, "agent") - 1).clip(0).alias("turn"))
    )

"""The first pass: everything about the selected rollouts but their tokens, and the wait for what is still arriving."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import polars as pl

from .calls import CALL_COLUMNS, narrow_calls, ordered_calls, with_defaults
from .clients import find_others, read_answers
from .evaluations import (
    EVALUATION_COLUMNS,
    FEEDBACK_QUERY,
    collect_evaluations,
    collect_feedback,
    with_feedback,
)
from .frames import PAYLOAD, ROLLOUT_KEY, SPAN_KEY, empty
from .ledger import Ledger
from .rollouts import rollout_table
from .source import Selection, Source
from .spans import SPAN_COLUMNS, narrow_spans
from .twins import Twins, find_twins

__all__ = ["Clock", "Survey", "late_calls", "survey_when_settled", "unused"]

_ALL_SELECTED: Final = pl.lit(True).alias("selected")
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0

_CALLS_OF_NO_ROLLOUT: Final = """
    SELECT c.trace_id, c.span_id, s.parent_span_id, c.rollout_id, c.attempt, c.task_id, c.run_id, c.round, c.split, c.agent,
           c.call_index, c.policy_name, c.policy_version, c.finish_reason, c.delivered, c.start_ns, c.end_ns,
           s.dropped_attributes, s.attributes, c.untrusted
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
    """CALLS, ordered, with `position`, `turn`, `next_index` and `selected` (all of them, before selecting.py), and `agent` resolved."""
    spans: pl.DataFrame
    """SPANS."""
    evaluations: pl.DataFrame
    """EVALUATIONS."""
    twins: Twins
    rollouts: pl.DataFrame
    """The rollout table (rollouts.py) with `selected`."""
    others: pl.DataFrame
    """OTHERS: the calls without tokens."""
    answers: pl.DataFrame
    """PAYLOAD of the calls whose tokens came with a client's span."""


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
    spans = narrow_spans(source.read("spans", selection, SPAN_COLUMNS, without_calls=True))
    evaluations = collect_evaluations(source.read("evaluations", selection, EVALUATION_COLUMNS))
    feedback = collect_feedback(source.query(FEEDBACK_QUERY))
    batches = source.read("calls", selection, CALL_COLUMNS)
    if selection.rollout_ids is not None and selection.run_id is None and selection.round is None:
        batches = chain(batches, source.query(_CALLS_OF_NO_ROLLOUT))
    calls = narrow_calls(batches)
    twins = find_twins(calls, spans)
    others, members = find_others(spans, twins.links.select(SPAN_KEY))
    covered, answers = twins.links.select(SPAN_KEY), empty(PAYLOAD)
    if others.height:
        served = pl.concat([calls["policy_name"], calls["request_model"]]).drop_nulls().unique().implode()
        answered, answers = read_answers(source, others)
        calls = pl.concat([calls, with_defaults(answered)])
        clients = answered.select("trace_id", pl.col("parent_span_id").alias("span_id"))
        # A call that the policy server recorded without tokens has come; of another one the server's word may still come.
        come = pl.concat([clients, others.filter("is_bare_call").select(SPAN_KEY)])
        of_come = members.join(come, left_on=["call_trace_id", "call_span_id"], right_on=SPAN_KEY, how="semi")
        covered = pl.concat([covered, of_come.select(SPAN_KEY)])
        others = others.filter(pl.col("is_bare_call") | ~pl.col("model").is_in(served).fill_null(False))
        others = others.join(clients, on=SPAN_KEY, how="anti", maintain_order="left")
    calls = ordered_calls(calls)
    used = ledger.used.select(*ROLLOUT_KEY)
    calls = calls.join(used, on=ROLLOUT_KEY, how="anti", maintain_order="left")
    others = others.join(used, on=ROLLOUT_KEY, how="anti", maintain_order="left")
    twins = find_twins(calls, spans)
    rollouts = rollout_table(calls, spans, covered, now_ns=now_ns, settle_s=settle_s)
    rollouts = rollouts.join(used, on=ROLLOUT_KEY, how="anti", maintain_order="left").with_columns(_ALL_SELECTED)
    evaluations = with_feedback(evaluations, feedback, calls)
    return Survey(_with_agents(calls, twins, spans, rollouts), spans, evaluations, twins, rollouts, others, answers)


def _with_agents(calls: pl.DataFrame, twins: Twins, spans: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """The agent of each call: its own word, the nearest ancestor that names one, a hash of its system prompt where a client
    recorded that, the service of the rollout's span.

    `turn` counts the calls of one agent within a rollout from 0; the choices of one response share it.
    """
    first_choice = (pl.col("choice_index") == 0) | pl.col("response_id").is_null()
    prompts = spans.drop_nulls("system_hash").select(
        pl.col("trace_id").alias("twin_trace_id"), pl.col("span_id").alias("twin_span_id"), "system_hash"
    )
    said = twins.calls.join(prompts, on=["twin_trace_id", "twin_span_id"], how="left", maintain_order="left")
    return (
        calls.join(
            said.select(*SPAN_KEY, "ancestor_agent", "system_hash"), on=SPAN_KEY, how="left", maintain_order="left"
        )
        .join(rollouts.select(*ROLLOUT_KEY, "service_name"), on=ROLLOUT_KEY, how="left", maintain_order="left")
        .with_columns(
            pl.coalesce("agent", "ancestor_agent", pl.format("prompt:{}", "system_hash"), "service_name").alias("agent")
        )
        .drop("ancestor_agent", "system_hash", "service_name")
        .with_columns(_ALL_SELECTED)
        .with_columns((first_choice.cast(pl.Int32).cum_sum().over(*ROLLOUT_KEY, "agent") - 1).clip(0).alias("turn"))
        .pipe(_with_next)
    )


def _with_next(calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `next_index`: the call index of the agent's next turn, NULL after its last one."""
    turn = [*ROLLOUT_KEY, "agent", "turn"]
    following = pl.col("call_index").shift(-1).over(turn[:-1]).alias("next_index")
    if not calls["choice_index"].max():
        return calls.with_columns(following)
    turns = calls.select(*turn, "call_index").unique(turn, keep="first", maintain_order=True)
    next_turns = turns.with_columns(following).drop("call_index")
    return calls.join(next_turns, on=turn, how="left", nulls_equal=True, maintain_order="left")

"""Rewards and credits all rollouts of a selection, chunk by chunk: everything that needs no tokens.

All rollouts are compared with each other, so a few numbers per rollout and call stay in memory. Calls are spilled to files.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from trainspan_processing.assembly.chunk import states_are_needed
from trainspan_processing.assembly.parts import PartPlan, plan_parts
from trainspan_processing.assembly.rows import CallLimits, limits
from trainspan_processing.assembly.snapshot import Snapshot, wait_for_rollouts
from trainspan_processing.assembly.spill import ChunkSummary, Spill
from trainspan_processing.credit.advantages import credit
from trainspan_processing.credit.plan import CreditPlan, looks_at_calls, plan_for
from trainspan_processing.dataset.files import Files
from trainspan_processing.dataset.ledger import NOTHING_USED, DatasetLedger, History
from trainspan_processing.read.engine import Engine
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.reasons.coverage import with_more_evaluations
from trainspan_processing.reasons.drop_reasons import judged_others
from trainspan_processing.reasons.reason_counts import count_reasons
from trainspan_processing.reasons.reason_examples import first_examples
from trainspan_processing.reasons.selection import admitted_evaluations
from trainspan_processing.reasons.waiting import Groups, find_groups
from trainspan_processing.rewards.definition import reward_digest
from trainspan_processing.rewards.evaluation_rewards import count_rewards
from trainspan_processing.rewards.labels import with_whole_pairs
from trainspan_processing.tables import ROLLOUT_KEY, empty
from trainspan_processing.traces.evaluations import COUNTED, EVALUATION_COLUMNS, collect_evaluations, count_evaluations
from trainspan_processing.traces.trace_index import Clock, index_chunks, index_traces
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["Assembly", "assemble"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """All rollouts, rewarded and credited; no tokens read."""

    rollouts: pl.DataFrame
    """rollout_id, attempt, run_id, round, task_id, judge, reward, end_ns, split, status, group_size, `pending`, `by_runner`,
    `is_signed` and `reason`."""
    groups: Groups
    """Groups whose last rollouts have not arrived; rollouts of waiting groups are pending."""
    compared: pl.DataFrame
    """The compared rollouts, sorted by ROLLOUT_KEY, with `rollout` (u32), group_id, the number of their `part`, their own
    number `in_part`, and the number and `tokens` (u32) of their `sound` calls (no drop reason so far)."""
    advantages: pl.DataFrame
    """rollout, position, return, advantage and drop of the calls of compared rollouts."""
    plan: CreditPlan
    """How rewards became advantages, with the default baseline resolved."""
    shares: pl.DataFrame
    """rollout_id, attempt, `part`, `value`: the shares of agents and single rewards, for comparison in later datasets."""
    reason_counts: pl.DataFrame
    """REASON_COUNTS of the dropped calls with tokens."""
    others: pl.DataFrame
    """REASON_COUNTS of the calls without tokens."""
    examples: pl.DataFrame
    """EXAMPLES of the reasons of calls with and without tokens."""
    limits: CallLimits
    used: pl.DataFrame
    """rollout_id, attempt and current number of `calls` of the rollouts that an earlier dataset used."""
    evaluations: pl.DataFrame
    """COUNTED and COUNTED_REWARDS: of evaluations with the reward's names, of new rollouts and of those that an earlier dataset
    used and that have more evaluations than it counted."""
    history: History | None
    """The values of earlier datasets; None if the baseline does not need them."""
    ignored_self_rewards: int
    labels: Mapping[str, int]
    """The counts of LabelEdges."""
    unmatched: int
    contested: int
    """Responses of several rollouts that late feedback names."""
    ignored_values: int
    """Measured values of states by other policy versions than the rollouts'."""
    ignored_claims: dict[str, int]
    """Claim → rollouts of which someone says so who is not heard (traces/rollout_table.py)."""
    function_error: str | None
    folder: Files
    """Folder with the sound calls of each part."""
    as_of_ns: int
    """The time as of which rollouts are pending and groups are waiting."""

    def files(self) -> Iterator[PartPlan]:
        """The files of the dataset (parts.py), in order."""
        return plan_parts(self.compared, self.advantages)


def assemble(
    engine: Engine,
    source: Source,
    selection: Selection,
    settings: DatasetSettings,
    ledger: DatasetLedger,
    clock: Clock,
    folder: Files,
    *,
    may_leave_groups: bool = True,
) -> Assembly:
    """Indexes, rewards and credits all rollouts of the selection that no earlier dataset used; spills calls to `folder`.

    Waits up to `wait_s` for rollouts that are still arriving. With `may_leave_groups`, leaves groups that lack rollouts to
    the next dataset for up to `group_wait_s`. Raises UsageError for unknown credits and baselines, and for functions that
    return something invalid.
    """
    with_state = states_are_needed(settings)
    snapshot = wait_for_rollouts(engine, source, selection, settings, ledger, clock)
    take = Spill(settings, folder, with_state)
    if snapshot.traces is not None:
        parts = [take(source, snapshot.traces, 0)]
    else:
        parts, _ = index_chunks(
            engine,
            source,
            snapshot.selections,
            ledger,
            take,
            now_ns=snapshot.now_ns,
            settle_s=settings.settle_s,
            around=snapshot.context,
        )
    rollouts = pl.concat(part.rollouts for part in parts)
    groups = find_groups(rollouts, ledger, snapshot.now_ns, settings.group_wait_s if may_leave_groups else 0.0)
    names = [reward.name for reward in parts[0].rewards]
    before = _rewards_of_used(source, selection, snapshot, names, settings, ledger)
    assembly = _combine(parts, rollouts, groups, settings, ledger, folder, snapshot, before)
    return replace(assembly, labels=with_whole_pairs(source, assembly.labels, rollouts))


def _combine(
    parts: list[ChunkSummary],
    rollouts: pl.DataFrame,
    groups: Groups,
    settings: DatasetSettings,
    ledger: DatasetLedger,
    folder: Files,
    snapshot: Snapshot,
    evaluations_of_used: pl.DataFrame,
) -> Assembly:
    """Compares and credits the rollouts of all parts, without those of waiting groups."""
    everyone = pl.concat(part.compared for part in parts).rename({"rollout": "in_part"}).sort(ROLLOUT_KEY)
    waits_for = groups.held_back
    held_back = everyone.join(waits_for, on=ROLLOUT_KEY, how="semi", maintain_order="left")
    compared = everyone.join(waits_for, on=ROLLOUT_KEY, how="anti", maintain_order="left").with_row_index("rollout")
    waits = pl.lit("group_unfinished").alias("reason")
    first = pl.lit(0, dtype=pl.UInt32).alias("first")
    waiting = held_back.filter(pl.col("sound") > 0).select(*ROLLOUT_KEY, waits, pl.col("sound").alias("calls"), first)
    plan = plan_for(settings, parts[0].rewards, compared)
    history = ledger.history(reward_digest(settings)) if plan.needs_history else None
    if history is not None and history.otherwise_rewarded:
        log.warning(
            "event=history_left_out rollouts=%d: the rewards of these rollouts of earlier datasets were defined otherwise, so "
            "that baseline %s does not compare with them",
            history.otherwise_rewarded,
            plan.estimator.baseline,
        )
    if claims := sum((Counter(part.ignored_claims) for part in parts), Counter[str]()):
        log.warning(
            "event=claims_ignored %s: untrusted senders say otherwise of so many rollouts that others vouch for",
            " ".join(f"{claim}={count}" for claim, count in sorted(claims.items())),
        )
    credited = credit(_taken_out(parts, compared), compared, (history or History()).values, plan)
    judged = judged_others(pl.concat(part.others for part in parts), any_call=any(part.calls for part in parts))
    return Assembly(
        rollouts=_as_pending(rollouts, held_back.select(*ROLLOUT_KEY, waits)),
        groups=groups,
        compared=compared,
        advantages=credited.calls.rechunk(),
        plan=plan,
        shares=compared.select("rollout", *ROLLOUT_KEY).join(credited.parts, on="rollout").drop("rollout"),
        reason_counts=pl.concat([*(part.reason_counts for part in parts), waiting]),
        others=count_reasons(judged.with_columns(pl.lit(0, dtype=pl.UInt32).alias("position"))),
        examples=first_examples(*(part.examples for part in parts), judged, waiting),
        limits=limits(settings, max((part.newest for part in parts if part.newest is not None), default=None)),
        used=snapshot.used,
        as_of_ns=snapshot.now_ns,
        history=history,
        evaluations=pl.concat([*(part.evaluations for part in parts), evaluations_of_used])
        .group_by("rollout_id")
        .agg(pl.col("evaluations", "rewards").max()),
        ignored_self_rewards=sum(part.ignored_self_rewards for part in parts),
        labels=dict(sorted(sum((Counter(part.labels) for part in parts), Counter[str]()).items())),
        unmatched=sum(part.unmatched for part in parts),
        contested=len(frozenset().union(*(part.contested for part in parts))),
        ignored_values=sum(part.ignored_values for part in parts),
        ignored_claims=dict(sorted(claims.items())),
        function_error=next((part.function_error for part in parts if part.function_error), None),
        folder=folder,
    )


def _as_pending(rollouts: pl.DataFrame, held_back: pl.DataFrame) -> pl.DataFrame:
    """The rollouts, with those that wait for their group pending for the `reason` there."""
    marked = rollouts.join(held_back, on=ROLLOUT_KEY, how="left", maintain_order="left")
    is_held = pl.col("reason_right").is_not_null()
    return marked.with_columns(pl.col("pending") | is_held, pl.coalesce("reason", "reason_right")).drop("reason_right")


def _taken_out(parts: Sequence[ChunkSummary], compared: pl.DataFrame) -> pl.DataFrame:
    """The credited calls, with the final numbers of their rollouts. Removed from the parts, to free their memory."""
    frames = []
    for number, part in enumerate(parts):
        numbers = compared.filter(pl.col("part") == number).select("in_part", "rollout")
        calls = part.credited.pop().rename({"rollout": "in_part"})
        frames.append(calls.join(numbers, on="in_part", maintain_order="left").drop("in_part"))
    return pl.concat(frames)


def _rewards_of_used(
    source: Source,
    selection: Selection,
    snapshot: Snapshot,
    names: Sequence[str],
    settings: DatasetSettings,
    ledger: DatasetLedger,
) -> pl.DataFrame:
    """COUNTED and COUNTED_REWARDS of the used rollouts with more evaluations than the ledger counted: only these are indexed again,
    to tell which of the evaluations count."""
    grown = with_more_evaluations(_counted_of_used(source, selection, snapshot, names), ledger)
    if grown.is_empty():
        return grown.with_columns(pl.lit(0, pl.UInt32).alias("rewards"))
    again = Selection(rollout_ids=grown["rollout_id"].to_list())
    context = replace(snapshot.context, are_counted=False)
    traces = index_traces(
        source, again, NOTHING_USED, now_ns=snapshot.now_ns, settle_s=settings.settle_s, around=context
    )
    rewards = count_rewards(
        admitted_evaluations(traces, settings),
        traces.spans,
        traces.rollouts,
        names,
        of_calls_count=looks_at_calls(settings),
    )
    return grown.join(rewards, on="rollout_id", how="left").with_columns(pl.col("rewards").fill_null(0))


def _counted_of_used(source: Source, selection: Selection, snapshot: Snapshot, names: Sequence[str]) -> pl.DataFrame:
    """COUNTED of rollouts that an earlier dataset used."""
    if snapshot.used.is_empty():
        return empty(COUNTED)
    known = snapshot.used.select("rollout_id").unique()
    foreign = snapshot.foreign.join(known, on="rollout_id", how="semi").partition_by("store", as_dict=True)
    selections = [
        selection,
        *(
            Selection(rollout_ids=part["rollout_id"].to_list(), stores=[int(str(store))])
            for (store,), part in foreign.items()
        ),
    ]
    batches = (batch for some in selections for batch in source.read("evaluations", some, EVALUATION_COLUMNS))
    return count_evaluations(
        collect_evaluations(batch.join(known, on="rollout_id", how="semi") for batch in batches), names
    )

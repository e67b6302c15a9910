"""Runs the dataset step in one chunk, without tokens or output: everything that determines a rollout's credit."""

from dataclasses import dataclass, replace

import polars as pl

from trainspan_processing.assembly.chunk import RewardedChunk, reward_chunk, states_are_needed
from trainspan_processing.assembly.rows import CallLimits, limits, newest_version
from trainspan_processing.credit.advantages import credit, with_credit
from trainspan_processing.credit.plan import CreditPlan, plan_for
from trainspan_processing.dataset.ledger import DatasetLedger, History
from trainspan_processing.read.source import Source
from trainspan_processing.reasons.drop_reasons import admitted_reasons, judged_others
from trainspan_processing.rewards.definition import reward_digest
from trainspan_processing.rewards.rollout_rewards import Rewarded
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True, slots=True)
class DryRun:
    """The decisions that need no tokens, for rollouts in one chunk."""

    rewarded: Rewarded
    plan: CreditPlan
    """How rewards became advantages, with the default baseline resolved."""
    compared: pl.DataFrame
    """RewardedChunk.compared."""
    calls: pl.DataFrame
    """RewardedChunk.calls with `return`, `advantage` and `drop`."""
    terms: pl.DataFrame
    """TERMS: each advantage in numbers, by (rollout, position)."""
    others: pl.DataFrame
    """rollout_id (NULL: no rollout), attempt, trace_id, span_id, agent and `reason` of the calls without tokens."""
    limits: CallLimits


def dry_run(
    source: Source,
    traces: TraceIndex,
    settings: DatasetSettings,
    ledger: DatasetLedger,
    held_back: pl.DataFrame | None = None,
    returned: pl.DataFrame | None = None,
) -> DryRun:
    """Rewards, compares and credits the indexed rollouts, except `held_back` ones (rollout_id, attempt), which wait for their group.

    `returned`: what the reward function returned before, if it is not to be called. Raises UsageError for unknown credits and
    baselines, and for functions that return something invalid.
    """
    with_state = states_are_needed(settings, calls_reward=returned is None)
    chunk = reward_chunk(source, traces, settings, with_state=with_state, returned=returned)
    if held_back is not None and held_back.height:
        chunk = _without(chunk, held_back)
    plan = plan_for(settings, chunk.rewarded.rewards, chunk.compared)
    history = ledger.history(reward_digest(settings)) if plan.needs_history else History()
    credited = credit(chunk.credited, chunk.compared, history.values, plan)
    return DryRun(
        rewarded=chunk.rewarded,
        plan=plan,
        compared=chunk.compared,
        calls=with_credit(chunk.calls, credited.calls),
        terms=credited.terms,
        others=judged_others(chunk.others, any_call=chunk.calls.height > 0),
        limits=limits(settings, newest_version(chunk.calls, admitted_reasons(settings.admit))),
    )


def _without(chunk: RewardedChunk, held_back: pl.DataFrame) -> RewardedChunk:
    """The chunk with these rollouts excluded from the comparison; their sound calls become `group_unfinished`."""
    numbers = chunk.compared.join(held_back, on=ROLLOUT_KEY, how="semi")["rollout"]
    is_held = pl.col("rollout").is_in(numbers.implode()).fill_null(value=False)
    waits = pl.when(is_held).then(pl.lit("group_unfinished"))
    return replace(
        chunk,
        compared=chunk.compared.join(held_back, on=ROLLOUT_KEY, how="anti", maintain_order="left"),
        calls=chunk.calls.with_columns(
            pl.coalesce("reason", waits).alias("reason"),
            *(pl.when(~is_held).then(name).alias(name) for name in ("rollout", "group_id")),
        ),
        credited=chunk.credited.filter(~is_held),
    )

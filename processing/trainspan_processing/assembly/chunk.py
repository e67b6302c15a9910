"""The middle of a dataset: rewards, groups, credit and reasons of every indexed call, before any token is read.

Rollouts are rewarded part by part, a part being some whole rollouts; they are compared all together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import polars as pl

from trainspan_processing.assembly.rows import Limits
from trainspan_processing.assembly.selection import load_filter, select
from trainspan_processing.credit.advantages import Credited, assign_advantages
from trainspan_processing.credit.groups import first_calls, hash_prompts, with_groups, with_states
from trainspan_processing.credit.plan import Plan, make_plan
from trainspan_processing.dataset.ledger import Ledger
from trainspan_processing.read.source import Source
from trainspan_processing.read.tokens import chunks_of_rollouts, read_tokens
from trainspan_processing.reasons.choices import check_choices
from trainspan_processing.reasons.drop_reasons import admitted_reasons, call_reason
from trainspan_processing.reasons.overlong import overlong_mode
from trainspan_processing.rewards.names import RewardName, rollout_column, step_column
from trainspan_processing.rewards.rollout_rewards import Rewarded, load_reward, reward_rollouts
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.settings import DatasetSettings

__all__ = [
    "Draft",
    "RewardedChunk",
    "credit",
    "draft_dataset",
    "judged_others",
    "limits",
    "newest_version",
    "plan_for",
    "reward_part",
    "states_are_needed",
    "with_credit",
]

_CREDITED: Final = ["rollout", "position", "agent", "turn"]


@dataclass(frozen=True, slots=True)
class RewardedChunk:
    """Some whole rollouts with their rewards, compared with nothing yet."""

    rewarded: Rewarded
    compared: pl.DataFrame
    """The complete, rewarded rollouts that made calls, with `rollout` (u32) and `group_id`."""
    calls: pl.DataFrame
    """All calls with `rollout` and `group_id` (NULL where the rollout is not compared), `reason` (as far as it shows) and
    `reward` (the call's own, weighted and added up)."""
    credited: pl.DataFrame
    """Of the calls of compared rollouts what credit needs: rollout, position, agent, turn, a `step_column` and a `rollout_column`
    per reward, and `state` where calls are compared by it."""
    others: pl.DataFrame
    """OTHERS with `rollout_reason`."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is decided without tokens, of rollouts that are one part."""

    rewarded: Rewarded
    plan: Plan
    """How rewards became advantages; the default baseline is settled."""
    compared: pl.DataFrame
    """As of the part."""
    calls: pl.DataFrame
    """As of the part, with `return`, `advantage` and `drop`."""
    terms: pl.DataFrame
    """TERMS: each advantage in numbers, by (rollout, position)."""
    others: pl.DataFrame
    """rollout_id (NULL: of no rollout), attempt, trace_id, span_id, agent and `reason` of the calls without tokens."""
    limits: Limits

    @property
    def sound(self) -> pl.DataFrame:
        """The calls with nothing against them so far."""
        return self.calls.filter(pl.col("reason").is_null())


def draft_dataset(
    source: Source, traces: TraceIndex, settings: DatasetSettings, ledger: Ledger, held: pl.DataFrame | None = None
) -> Draft:
    """Rewards, compares and credits what was indexed, but for rollouts that are `held` (rollout_id, attempt) for their group.

    Raises UsageError for unknown names of credit and baseline, and for functions that do not keep to their form.
    """
    part = reward_part(source, traces, settings, with_state=states_are_needed(settings))
    if held is not None and held.height:
        part = _without(part, held)
    plan = plan_for(settings, part.rewarded.rewards, part.compared)
    credited = credit(part.credited, part.compared, ledger, plan)
    return Draft(
        rewarded=part.rewarded,
        plan=plan,
        compared=part.compared,
        calls=with_credit(part.calls, credited.calls),
        terms=credited.terms,
        others=judged_others(part.others, any_call=part.calls.height > 0),
        limits=limits(settings, newest_version(part.calls)),
    )


def _without(part: RewardedChunk, held: pl.DataFrame) -> RewardedChunk:
    """The part with nothing of these rollouts compared; their sound calls are `group_unfinished`."""
    numbers = part.compared.join(held, on=ROLLOUT_KEY, how="semi")["rollout"]
    is_held = pl.col("rollout").is_in(numbers.implode()).fill_null(value=False)
    waits = pl.when(is_held).then(pl.lit("group_unfinished"))
    return replace(
        part,
        compared=part.compared.join(held, on=ROLLOUT_KEY, how="anti", maintain_order="left"),
        calls=part.calls.with_columns(
            pl.coalesce("reason", waits).alias("reason"),
            *(pl.when(~is_held).then(name).alias(name) for name in ("rollout", "group_id")),
        ),
        credited=part.credited.filter(~is_held),
    )


def states_are_needed(settings: DatasetSettings) -> bool:
    """Whether calls are compared by state. Raises UsageError for names and functions that cannot be used, before any work."""
    check_choices(settings.choices)
    if settings.reward is not None:
        load_reward(settings.reward)
    if settings.filter is not None:
        load_filter(settings.filter)
    return make_plan(settings, has_tasks=True).needs_states


def plan_for(settings: DatasetSettings, rewards: Sequence[RewardName], compared: pl.DataFrame) -> Plan:
    """The plan for these rollouts: the default baseline depends on whether any of them has a task."""
    has_tasks = compared.is_empty() or bool(compared["task_id"].is_not_null().any())
    return replace(make_plan(settings, has_tasks=has_tasks), rewards=tuple(rewards))


def limits(settings: DatasetSettings, newest: int | None) -> Limits:
    """What the settings demand of a call with tokens, `newest` being the newest policy version of all calls."""
    return Limits(
        newest,
        settings.max_staleness,
        settings.max_tokens,
        settings.keep_zero_spread,
        check_choices(settings.choices),
    )


def newest_version(calls: pl.DataFrame) -> int | None:
    """The highest policy version among `calls`."""
    newest = calls["policy_version"].max()
    return newest if isinstance(newest, int) else None


def reward_part(source: Source, traces: TraceIndex, settings: DatasetSettings, *, with_state: bool) -> RewardedChunk:
    """Rewards what was indexed, and finds which rollouts can be compared and in which group each is."""
    traces = select(source, traces, settings)
    rewarded = reward_rollouts(source, traces, settings)
    compared = _compared(source, traces, rewarded)
    calls = _with_rewards(traces.calls, rewarded, compared)
    if with_state:
        calls = _with_states(source, traces.answers, calls)
    names = [column(reward.name) for reward in rewarded.rewards for column in (step_column, rollout_column)]
    states = ["state"] if with_state else []
    reasons = rewarded.rollouts.select(*ROLLOUT_KEY, pl.col("reason").alias("rollout_reason"))
    return RewardedChunk(
        rewarded,
        compared,
        calls.with_columns(
            call_reason(admitted_reasons(settings.admit), mask_overlong=overlong_mode(settings) == "mask").alias(
                "reason"
            ),
            _own_reward(rewarded.rewards),
        ).drop(names, states),
        calls.filter(pl.col("rollout").is_not_null()).select(*_CREDITED, *states, *names),
        traces.others.join(reasons, on=ROLLOUT_KEY, how="left"),
    )


def credit(calls: pl.DataFrame, compared: pl.DataFrame, ledger: Ledger, plan: Plan) -> Credited:
    """The advantages of `calls` (Part.credited) of `compared` rollouts."""
    facts = compared.select(
        "rollout",
        pl.col("group_id").rank("dense").cast(pl.UInt32).alias("group"),
        "run_id",
        "end_ns",
        *ROLLOUT_KEY,
    ).sort(ROLLOUT_KEY)
    history = ledger.history().join(facts, on=ROLLOUT_KEY, how="anti")
    return assign_advantages(calls, facts, history, plan)


def with_credit(calls: pl.DataFrame, advantages: pl.DataFrame) -> pl.DataFrame:
    """Adds return, advantage and drop to Part.calls. A compared call that nothing gave a value lacks a reward."""
    without_value = pl.when(pl.col("rollout").is_not_null() & pl.col("return").is_null()).then(pl.lit("no_reward"))
    return calls.join(advantages, on=["rollout", "position"], how="left", maintain_order="left").with_columns(
        pl.coalesce("reason", without_value).alias("reason")
    )


def judged_others(others: pl.DataFrame, *, any_call: bool) -> pl.DataFrame:
    """A call of a model that is not ours is not selected; where nothing came from a policy server (`any_call`), it lacks tokens."""
    is_foreign = pl.lit(any_call) & ~pl.col("is_bare_call")
    reason = (
        pl.when(is_foreign)
        .then(pl.lit("not_selected"))
        .when(pl.col("redacted").fill_null(False))
        .then(pl.lit("redacted"))
        .when(pl.col("rollout_id").is_null())
        .then(pl.lit("no_rollout"))
        .otherwise(pl.coalesce("rollout_reason", pl.lit("no_token_ids")))
    )
    return others.select(*ROLLOUT_KEY, *SPAN_KEY, "agent", reason.alias("reason"))


def _compared(source: Source, traces: TraceIndex, rewarded: Rewarded) -> pl.DataFrame:
    present = rewarded.rollouts.filter(pl.col("reason").is_null() & (pl.col("n_calls") > 0)).with_row_index("rollout")
    firsts = first_calls(traces.calls, present.filter(pl.col("task_id").is_null()))
    return with_groups(present, hash_prompts(firsts, _prompts(source, firsts, traces.answers)))


def _prompts(source: Source, calls: pl.DataFrame, answers: pl.DataFrame) -> Iterator[pl.DataFrame]:
    for part in chunks_of_rollouts(calls):
        yield read_tokens(source, part, columns=(*SPAN_KEY, "prompt_ids"), answers=answers)


def _with_rewards(calls: pl.DataFrame, rewarded: Rewarded, compared: pl.DataFrame) -> pl.DataFrame:
    """All calls with what their rollout says, and their own rewards."""
    names = [reward.name for reward in rewarded.rewards]
    of_group = compared.select(*ROLLOUT_KEY, "rollout", "group_id", *(rollout_column(name) for name in names))
    said = (pl.col("reason").alias("rollout_reason"), pl.col("is_signed").alias("rollout_is_signed"), "task_id")
    of_rollout = rewarded.rollouts.select(*ROLLOUT_KEY, *said).join(
        of_group, on=ROLLOUT_KEY, how="left", maintain_order="left"
    )
    return (
        calls.drop("task_id")
        .join(of_rollout, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .join(rewarded.of_calls, on=SPAN_KEY, how="left", maintain_order="left")
    )


def _with_states(source: Source, answers: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `state` to the calls of compared rollouts."""
    unnamed = calls.filter(pl.col("rollout").is_not_null() & pl.col("state_key").is_null())
    named = unnamed.select(*ROLLOUT_KEY, *SPAN_KEY, "store", "seq", "n_tokens")
    return with_states(calls, hash_prompts(named, _prompts(source, named, answers)))


def _own_reward(rewards: Sequence[RewardName]) -> pl.Expr:
    """`reward` of a call: its own rewards, weighted and added up; NULL where it has none."""
    steps = {step_column(reward.name): reward.weight for reward in rewards}
    total = pl.sum_horizontal(pl.col(name) * weight for name, weight in steps.items())
    return pl.when(pl.any_horizontal(pl.col(name).is_not_null() for name in steps)).then(total).alias("reward")

"""Selects, rewards and groups one chunk of whole rollouts, and finds the drop reasons that need no tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.credit.groups import (
    first_calls,
    hash_answers,
    hash_prompts,
    with_groups,
    with_requests,
    with_states,
)
from trainspan_processing.credit.plan import looks_at_calls, make_plan
from trainspan_processing.credit.vine import state_values
from trainspan_processing.read.source import Source
from trainspan_processing.read.tokens import chunks_of_rollouts, read_tokens
from trainspan_processing.reasons.drop_reasons import UNSIGNED, UNTRUSTED, admitted_reasons, call_reason
from trainspan_processing.reasons.overlong import overlong_mode
from trainspan_processing.reasons.selection import load_filter, select
from trainspan_processing.rewards.definition import reward_definition
from trainspan_processing.rewards.names import RewardName, rollout_column, step_column
from trainspan_processing.rewards.rollout_rewards import Rewarded, load_reward, reward_rollouts
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["RewardedChunk", "reward_chunk", "states_are_needed"]

_CREDITED: Final = ["rollout", "position", "request", "agent", "turn"]


@dataclass(frozen=True, slots=True)
class RewardedChunk:
    """Whole rollouts with their rewards, before any comparison."""

    rewarded: Rewarded
    compared: pl.DataFrame
    """The complete, rewarded rollouts with calls, with `rollout` (u32) and `group_id`."""
    calls: pl.DataFrame
    """All calls with `rollout` and `group_id` (NULL if the rollout is not compared), `reason` (as far as it is known
    without tokens) and `reward` (the weighted sum of the call's own rewards)."""
    credited: pl.DataFrame
    """Calls of compared rollouts with the columns for credit: rollout, position, request, agent, turn, `call_kind` if a kind has
    an estimator of its own, a `step_column` and a `rollout_column` per reward, `state` and `action` if calls are compared by
    them, and `state_value` if measured values are used."""
    others: pl.DataFrame
    """OTHERS with `rollout_reason`."""
    ignored_values: int = 0
    """Calls with a measured value that is not used: of another policy version than the rollout's, or of another reward."""


def states_are_needed(settings: DatasetSettings, *, calls_reward: bool = True) -> bool:
    """Whether calls are compared by state. Raises UsageError for unusable names and functions, before any work."""
    if settings.reward is not None and calls_reward:
        load_reward(settings.reward)
    if settings.filter is not None:
        load_filter(settings.filter)
    return make_plan(settings, has_tasks=True).needs_states


def reward_chunk(
    source: Source,
    traces: TraceIndex,
    settings: DatasetSettings,
    *,
    with_state: bool,
    returned: pl.DataFrame | None = None,
) -> RewardedChunk:
    """Rewards the indexed rollouts, and finds those that can be compared and their groups. `returned`: see reward_rollouts."""
    traces = select(source, traces, settings)
    rewarded = reward_rollouts(source, traces, settings, returned, of_calls_count=looks_at_calls(settings))
    compared = _compared(source, traces.heard(), rewarded)
    calls = _with_rewards(traces.calls, rewarded, compared)
    plan = make_plan(settings, has_tasks=True)
    if with_state:
        calls = _with_states(source, traces.answers, calls)
    extra = ["state"] if with_state else []
    if with_state and plan.needs_actions:
        calls = _with_actions(source, traces.answers, calls)
        extra.append("action")
    ignored_values = 0
    if plan.needs_values:
        calls, ignored_values = state_values(source, calls, reward_definition(settings))
        extra.append("state_value")
    names = [column(reward.name) for reward in rewarded.rewards for column in (step_column, rollout_column)]
    kind = ["call_kind"] if plan.kinds else []
    reasons = rewarded.rollouts.select(*ROLLOUT_KEY, pl.col("reason").alias("rollout_reason"))
    return RewardedChunk(
        rewarded,
        compared,
        calls.with_columns(
            call_reason(admitted_reasons(settings.admit), mask_overlong=overlong_mode(settings) == "mask").alias(
                "reason"
            ),
            _own_reward(rewarded.rewards),
        ).drop(names, extra),
        with_requests(calls.filter(pl.col("rollout").is_not_null() & pl.col("is_heard"))).select(
            *_CREDITED, *kind, *extra, *names
        ),
        traces.others.join(reasons, on=ROLLOUT_KEY, how="left"),
        ignored_values,
    )


def _compared(source: Source, traces: TraceIndex, rewarded: Rewarded) -> pl.DataFrame:
    present = rewarded.judged.filter(pl.col("reason").is_null() & (pl.col("n_calls") > 0)).with_row_index("rollout")
    firsts = first_calls(traces.calls, present.filter(pl.col("task_id").is_null()))
    return with_groups(present, hash_prompts(firsts, _ids(source, firsts, traces.answers)))


def _ids(source: Source, calls: pl.DataFrame, answers: pl.DataFrame, ids: str = "prompt_ids") -> Iterator[pl.DataFrame]:
    for part in chunks_of_rollouts(calls):
        yield read_tokens(source, part, columns=(*SPAN_KEY, ids), answers=answers)


def _with_rewards(calls: pl.DataFrame, rewarded: Rewarded, compared: pl.DataFrame) -> pl.DataFrame:
    """Adds the columns of their rollout and their own rewards to all calls."""
    names = [reward.name for reward in rewarded.rewards]
    of_group = compared.select(*ROLLOUT_KEY, "rollout", "group_id", *(rollout_column(name) for name in names))
    facts = (pl.col("reason").alias("rollout_reason"), "task_id", pl.lit(value=True).alias("is_known"))
    of_rollout = rewarded.rollouts.select(*ROLLOUT_KEY, *facts).join(
        of_group, on=ROLLOUT_KEY, how="left", maintain_order="left"
    )
    # An attempt that only a stranger states is none.
    whose = pl.when(pl.col("untrusted").fill_null(value=False)).then(pl.lit(UNTRUSTED)).otherwise(pl.lit(UNSIGNED))
    return (
        calls.drop("task_id")
        .join(of_rollout, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .with_columns(pl.when("is_known").then("rollout_reason").otherwise(whose).alias("rollout_reason"))
        .drop("is_known")
        .join(rewarded.of_calls, on=SPAN_KEY, how="left", maintain_order="left")
    )


def _with_states(source: Source, answers: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `state` to the calls of compared rollouts."""
    unnamed = calls.filter(pl.col("rollout").is_not_null() & pl.col("state_key").is_null())
    unnamed = unnamed.select(*ROLLOUT_KEY, *SPAN_KEY, "store", "seq", "n_tokens")
    return with_states(calls, hash_prompts(unnamed, _ids(source, unnamed, answers)))


def _with_actions(source: Source, answers: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Adds `action`, a hash of the sampled ids, to the calls of compared rollouts."""
    compared = calls.filter(pl.col("rollout").is_not_null()).select(*ROLLOUT_KEY, *SPAN_KEY, "store", "seq", "n_tokens")
    hashes = hash_answers(compared, _ids(source, compared, answers, "completion_ids"))
    hashes = hashes.select(*SPAN_KEY, pl.col("answer_hash").alias("action"))
    return calls.join(hashes, on=SPAN_KEY, how="left", maintain_order="left")


def _own_reward(rewards: Sequence[RewardName]) -> pl.Expr:
    """`reward` of a call: the weighted sum of its own rewards; NULL if it has none."""
    steps = {step_column(reward.name): reward.weight for reward in rewards}
    total = pl.sum_horizontal(pl.col(name) * weight for name, weight in steps.items())
    return pl.when(pl.any_horizontal(pl.col(name).is_not_null() for name in steps)).then(total).alias("reward")

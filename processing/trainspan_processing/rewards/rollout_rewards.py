"""Rewards indexed rollouts: from stored evaluations and signals in the trace, or by the user's function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from trainspan_processing.read.source import Source
from trainspan_processing.read.tool_uses import TOOL_USES, read_tool_uses
from trainspan_processing.reasons.choices import unused_overlong
from trainspan_processing.reasons.drop_reasons import early_reason, rollout_reason
from trainspan_processing.reasons.overlong import OVERLONG, overlong_edges, overlong_penalty
from trainspan_processing.rewards.air import AIR, air_edges, air_rules
from trainspan_processing.rewards.binding import UNCLEAR
from trainspan_processing.rewards.evaluation_rewards import Rewards, bind_rewards
from trainspan_processing.rewards.function_rewards import FunctionRewards, recorded_rewards, reward_by_function
from trainspan_processing.rewards.labels import LABEL_RULE, label_edges, without_labeled_calls
from trainspan_processing.rewards.names import RewardName, filled_names, reward_names, rollout_column, step_column
from trainspan_processing.rewards.range import check_max_reward, is_outside
from trainspan_processing.rewards.status_rewards import (
    FUNCTION_STATUSES,
    label_values,
    status_edges,
    status_rewards,
    with_status_edges,
)
from trainspan_processing.tables import EDGES, ROLLOUT_KEY, SPAN_KEY, empty
from trainspan_processing.traces.rollout_reader import stored_rollouts
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_processing.traces.trust import of_own_traces
from trainspan_schemas.agents.functions import load_function
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    from trainspan_schemas.agents.invocation import Invoker

__all__ = ["Rewarded", "load_reward", "reward_rollouts"]

_SIGNALS: Final = (AIR, OVERLONG)
"""Rewards derived from the trace itself."""
_OF_ROLLOUT: Final = "identical"
"""The credit of a rollout's sum, whichever call a reward belongs to."""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """Rollouts with their rewards and reasons."""

    rollouts: pl.DataFrame
    """The rollout table with a `rollout_column` per reward, `reward` (the weighted sum of all its rewards, NULL if a required
    one is missing), `reward_failed`, `reward_outside`, `teaches`, `reason`, `labeled` and `function_rewards` (as in LEDGER)."""
    of_calls: pl.DataFrame
    """trace_id, span_id and a `step_column` per reward."""
    edges: pl.DataFrame
    """EDGES: every reward with its binding rule."""
    rewards: tuple[RewardName, ...]
    """The rewards of the settings, and `air` and `overlong` if there are such rules."""
    ignored_self_rewards: int = 0
    unmatched: int = 0
    function_error: str | None = None
    by_function: bool = False
    """Whether the rewards are a function's."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """The counts of labels (LabelEdges)."""

    @property
    def judged(self) -> pl.DataFrame:
        """`rollouts`, in which `judge` is NULL unless the reward is its verdict."""
        return self.rollouts.with_columns(pl.lit(None, pl.String).alias("judge")) if self.by_function else self.rollouts


def load_reward(name: str) -> Callable[..., Any]:
    """The user's reward function. Raises UsageError or ProcessError if it cannot be used (functions.py)."""
    return load_function(name, "rollout", may_be_async=True)


def reward_rollouts(
    source: Source,
    traces: TraceIndex,
    settings: DatasetSettings,
    returned: pl.DataFrame | None = None,
    *,
    of_calls_count: bool = False,
) -> Rewarded:
    """Rewards every rollout of the index by what is heard. Raises UsageError for malformed settings or a function that cannot be loaded.

    `returned` is what the reward function returned when a dataset was built (Published.returned); then it is not called.
    `of_calls_count`: whether labels on calls count (credit/plan.py, looks_at_calls).
    """
    check_max_reward(settings.max_reward)
    traces = traces.heard()
    names, rules = reward_names(settings.reward_name), air_rules(settings.air)
    rewards = (*names, RewardName(AIR, may_be_missing=True, is_penalty=True)) if rules else names
    spans = of_own_traces(traces.spans, traces.calls, traces.vouched) if rules else traces.spans
    uses = read_tool_uses(source, traces.calls, spans) if rules else pl.DataFrame(schema=TOOL_USES)
    signals = air_edges(rules, traces.calls, spans, traces.matches, uses)
    if (penalty := overlong_penalty(settings)) is not None:
        rewards = (*rewards, RewardName(OVERLONG, may_be_missing=True, is_penalty=True))
        charged = traces.calls
        if settings.choices == "used":
            charged = charged.join(unused_overlong(source, traces, settings), on=SPAN_KEY, how="anti")
        signals = pl.concat([signals, overlong_edges(penalty, charged)])
    filled = filled_names(names)
    of_status = status_rewards(settings.status_rewards)
    labels = label_edges(
        traces.evaluations,
        traces.calls,
        traces.rollouts,
        label_values(of_status),
        filled,
        of_calls_count=of_calls_count,
    )
    by_status = with_status_edges(status_edges(of_status, filled, traces.rollouts), labels.of_rollouts)
    signals = pl.concat([signals, labels.of_calls])
    if settings.reward is not None:
        by_function = _by_function(source, traces, settings, rewards, signals, by_status, returned)
        return replace(by_function, labels=labels.counts)
    bound = bind_rewards(
        traces.evaluations,
        traces.calls,
        traces.spans,
        traces.matches,
        traces.rollouts,
        [reward.name for reward in names],
    )
    others = without_labeled_calls(bound.edges, labels.of_calls)
    together = replace(bound, edges=pl.concat([with_status_edges(others, by_status), signals]))
    invalid = bound.invalid.join(labels.of_rollouts, on=ROLLOUT_KEY, how="anti", maintain_order="left")
    rollouts = _with_flags(traces.rollouts, bound.untrusted, invalid)
    rollouts = _with_lesson(rollouts, by_status)
    for reward in rewards:
        scores = together.of_rollouts(reward.name).rename({"rollout_reward": rollout_column(reward.name)})
        rollouts = rollouts.join(scores, on=ROLLOUT_KEY, how="left", maintain_order="left")
    of_calls = _of_calls(together, rewards)
    rollouts = _with_unclear(rollouts, together.edges, settings)
    return Rewarded(
        _with_totals(rollouts, traces.calls, of_calls, together.edges, names, rewards, settings.max_reward),
        of_calls,
        together.edges,
        rewards,
        bound.ignored_self_rewards,
        bound.unmatched,
        labels=labels.counts,
    )


def _with_flags(rollouts: pl.DataFrame, untrusted: pl.DataFrame, invalid: pl.DataFrame) -> pl.DataFrame:
    """Adds `reward_untrusted`, `reward_invalid` and what only reward functions give."""
    for column, where in (("reward_untrusted", untrusted), ("reward_invalid", invalid)):
        marked = where.with_columns(pl.lit(True).alias(column))
        rollouts = rollouts.join(marked, on=ROLLOUT_KEY, how="left", maintain_order="left")
    return rollouts.with_columns(
        pl.lit(False).alias("reward_failed"),
        pl.col("reward_untrusted", "reward_invalid").fill_null(False),
        pl.lit(None, dtype=pl.String).alias("function_rewards"),
    )


def _by_function(
    source: Source,
    traces: TraceIndex,
    settings: DatasetSettings,
    rewards: Sequence[RewardName],
    signals: pl.DataFrame,
    by_status: pl.DataFrame,
    returned: pl.DataFrame | None,
) -> Rewarded:
    """Rewards by the function. A labeled rollout keeps its label. A failed one gets the function's reward, else the reward by its
    status, else is dropped."""
    names = [reward.name for reward in rewards if reward.name not in _SIGNALS]
    assert settings.reward is not None
    labeled = by_status.filter(pl.col("rule") == LABEL_RULE)
    eligible = traces.rollouts.filter(early_reason().is_null() & pl.col("status").is_in(FUNCTION_STATUSES)).join(
        labeled, on=ROLLOUT_KEY, how="anti", maintain_order="left"
    )
    if returned is None:
        result = _called(source, traces, settings, names, eligible)
    else:
        result = recorded_rewards(settings.reward, names, returned.join(eligible, on=ROLLOUT_KEY, how="semi"))
    rollouts = traces.rollouts.join(
        result.rewards.rename({name: rollout_column(name) for name in names}),
        on=ROLLOUT_KEY,
        how="left",
        maintain_order="left",
    ).with_columns(
        pl.col("reward_failed").fill_null(False),
        pl.lit(False).alias("reward_untrusted"),
        pl.lit(False).alias("reward_invalid"),
    )
    given = result.edges(traces.rollouts, traces.calls)
    answered = pl.concat([given.select(ROLLOUT_KEY), rollouts.filter("reward_failed").select(ROLLOUT_KEY)])
    by_status = by_status.join(answered, on=ROLLOUT_KEY, how="anti", maintain_order="left")
    for name in by_status["name"].unique(maintain_order=True):
        filled = by_status.filter(pl.col("name") == name).select(*ROLLOUT_KEY, pl.col("score").alias("_by_status"))
        rollouts = rollouts.join(filled, on=ROLLOUT_KEY, how="left", maintain_order="left")
        column = rollout_column(name)
        rollouts = rollouts.with_columns(pl.coalesce(column, "_by_status").alias(column)).drop("_by_status")
    rollouts = _with_lesson(rollouts, pl.concat([by_status.select(ROLLOUT_KEY), given.select(ROLLOUT_KEY)]))
    unsaid = [reward.name for reward in rewards if reward.name in _SIGNALS]
    given = without_labeled_calls(given, signals.filter(pl.col("rule") == LABEL_RULE))
    bound = Rewards(pl.concat([given, signals]), 0, 0, traces.rollouts.clear(), traces.rollouts.clear())
    for name in unsaid:
        scores = bound.of_rollouts(name).rename({"rollout_reward": rollout_column(name)})
        rollouts = rollouts.join(scores, on=ROLLOUT_KEY, how="left", maintain_order="left")
    rollouts = _with_unclear(rollouts, signals, settings)
    of_calls = _of_calls(bound, rewards)
    every = tuple(rewards)
    from_function = [reward for reward in every if reward.name not in _SIGNALS]
    edges = pl.concat([by_status, given, signals])
    return Rewarded(
        _with_totals(rollouts, traces.calls, of_calls, edges, from_function, every, settings.max_reward),
        of_calls,
        edges,
        every,
        function_error=result.first_error,
        by_function=True,
    )


def _called(
    source: Source, traces: TraceIndex, settings: DatasetSettings, names: Sequence[str], eligible: pl.DataFrame
) -> FunctionRewards:
    """Calls the function on the eligible rollouts."""
    assert settings.reward is not None
    if settings.reward_concurrency < 1 or not settings.reward_timeout_s > 0:
        raise UsageError(
            f"reward_concurrency = {settings.reward_concurrency}, reward_timeout_s = {settings.reward_timeout_s:g}: "
            "the first must be at least 1, the second positive"
        )
    invoker = _invoker(load_reward(settings.reward))
    stored = stored_rollouts(source, traces, eligible)
    return reward_by_function(
        invoker, settings.reward, names, stored, settings.reward_concurrency, settings.reward_timeout_s
    )


def _with_unclear(rollouts: pl.DataFrame, edges: pl.DataFrame, settings: DatasetSettings) -> pl.DataFrame:
    """Adds `reward_unclear`: it is unknown which call has one of the rewards, and that matters for the credit."""
    if settings.credit == _OF_ROLLOUT:
        return rollouts.with_columns(pl.lit(value=False).alias("reward_unclear"))
    unclear = edges.filter(pl.col("rule") == UNCLEAR).select(ROLLOUT_KEY).unique()
    marked = unclear.with_columns(pl.lit(value=True).alias("reward_unclear"))
    return rollouts.join(marked, on=ROLLOUT_KEY, how="left", maintain_order="left").with_columns(
        pl.col("reward_unclear").fill_null(value=False)
    )


def _with_lesson(rollouts: pl.DataFrame, taught: pl.DataFrame) -> pl.DataFrame:
    """Adds `teaches`: the rollout is ok, or is in `taught`, the rollouts with a reward in spite of their status."""
    marked = taught.select(ROLLOUT_KEY).unique().with_columns(pl.lit(True).alias("teaches"))
    is_ok = pl.col("status") == "ok"
    return rollouts.join(marked, on=ROLLOUT_KEY, how="left", maintain_order="left").with_columns(
        (is_ok | pl.col("teaches")).fill_null(False).alias("teaches")
    )


@cache
def _invoker(function: Callable[..., Any]) -> "Invoker":
    """The invoker, shared by all chunks of a store, so that resources opened by an asynchronous function stay usable."""
    from trainspan_schemas.agents.invocation import Invoker  # loads asyncio, which few datasets need

    return Invoker(function, "trainspan-reward")


def _of_calls(bound: Rewards, rewards: Sequence[RewardName]) -> pl.DataFrame:
    """trace_id, span_id and a `step_column` per reward, of the calls with any reward."""
    joined = empty({name: EDGES[f"call_{name}"] for name in SPAN_KEY})
    for reward in rewards:
        scores = bound.of_calls(reward.name).rename({"reward": step_column(reward.name)})
        joined = joined.join(scores, on=SPAN_KEY, how="full", coalesce=True)
    return joined


def _with_totals(
    rollouts: pl.DataFrame,
    calls: pl.DataFrame,
    of_calls: pl.DataFrame,
    edges: pl.DataFrame,
    names: Sequence[RewardName],
    rewards: Sequence[RewardName],
    limit: float,
) -> pl.DataFrame:
    """Adds `reward`, `reward_outside` (a score or a sum of scores is beyond `limit`), `labeled` and `reason`.

    A missing reward does not count as 0: the total is NULL if a required reward is missing.
    """
    steps = [step_column(reward.name) for reward in rewards]
    owned = calls.select(*ROLLOUT_KEY, *SPAN_KEY).join(of_calls, on=SPAN_KEY).sort(*SPAN_KEY)
    sums = owned.group_by(ROLLOUT_KEY, maintain_order=True).agg(
        pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()) for name in steps
    )
    totals = {
        reward.name: pl.when(_has(reward)).then(
            pl.sum_horizontal(rollout_column(reward.name), step_column(reward.name)) * reward.weight
        )
        for reward in rewards
    }
    complete = pl.all_horizontal(pl.lit(True), *(_has(reward) for reward in names if not reward.may_be_missing))
    any_named = pl.any_horizontal(_has(reward) for reward in names)
    outside = pl.concat(
        [
            edges.filter(is_outside(pl.col("score"), limit)).select(ROLLOUT_KEY),
            owned.filter(pl.any_horizontal(is_outside(pl.col(name), limit) for name in steps)).select(ROLLOUT_KEY),
        ]
    ).unique()
    labeled = edges.filter(pl.col("rule") == LABEL_RULE).select(ROLLOUT_KEY).unique()
    summed = ("reward", *(rollout_column(reward.name) for reward in rewards), *steps)
    return (
        rollouts.join(sums, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .join(outside.with_columns(pl.lit(True).alias("_outside")), on=ROLLOUT_KEY, how="left", maintain_order="left")
        .join(labeled.with_columns(pl.lit(True).alias("labeled")), on=ROLLOUT_KEY, how="left", maintain_order="left")
        .with_columns(pl.col("labeled").fill_null(False))
        .with_columns(pl.when(complete & any_named).then(pl.sum_horizontal(totals.values())).alias("reward"))
        .with_columns(
            pl.any_horizontal(
                pl.col("_outside").fill_null(False), *(is_outside(pl.col(name), limit) for name in summed)
            ).alias("reward_outside")
        )
        .drop(steps, "_outside")
        .with_columns(rollout_reason().alias("reason"))
    )


def _has(reward: RewardName) -> pl.Expr:
    return pl.col(rollout_column(reward.name)).is_not_null() | pl.col(step_column(reward.name)).is_not_null()

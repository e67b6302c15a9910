"""The middle of a dataset: rewards, groups, credit and reasons of every surveyed call, before any token is read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import polars as pl

from trainspan_schemas.settings import DatasetSettings

from .advantages import Credited, assign_advantages, rollout_column, step_column
from .frames import ROLLOUT_KEY, SPAN_KEY
from .grouping import first_calls, hash_prompts, with_groups, with_states
from .ledger import Ledger
from .payload import read_payload
from .plan import Plan, make_plan
from .rewarding import Rewarded, reward_rollouts
from .rows import Limits
from .selecting import select
from .source import Source
from .survey import Survey
from .trainability import call_reason

__all__ = ["Draft", "draft_dataset"]


@dataclass(frozen=True, slots=True)
class Draft:
    """What is decided without tokens."""

    rewarded: Rewarded
    plan: Plan
    """How rewards became advantages; the default baseline is settled."""
    compared: pl.DataFrame
    """The complete, rewarded rollouts that made calls, with `rollout` (u32) and `group_id`."""
    calls: pl.DataFrame
    """All calls with `rollout` and `group_id` (NULL where the rollout is not compared), `reason` (as far as it shows),
    `reward` (the call's own, weighted and added up), `return`, `advantage` and `drop`."""
    terms: pl.DataFrame
    """TERMS: each advantage in numbers, by (rollout, position)."""
    parts: pl.DataFrame
    """rollout_id, attempt, `part`, `value`: what later datasets compare agents and single rewards with."""
    others: pl.DataFrame
    """rollout_id (NULL: of no rollout), attempt, trace_id, span_id and `reason` of the calls without tokens."""
    limits: Limits

    @property
    def sound(self) -> pl.DataFrame:
        """The calls with nothing against them so far."""
        return self.calls.filter(pl.col("reason").is_null())


def draft_dataset(source: Source, survey: Survey, settings: DatasetSettings, ledger: Ledger) -> Draft:
    """Rewards, compares and credits what was surveyed.

    Raises UsageError for unknown names of credit and baseline, and for functions that do not keep to their form.
    """
    make_plan(settings, has_tasks=True)  # an unknown name fails before any work
    survey = select(source, survey, settings)
    rewarded = reward_rollouts(source, survey, settings)
    compared = _compared(source, survey, rewarded)
    has_tasks = compared.is_empty() or bool(compared["task_id"].is_not_null().any())
    plan = replace(make_plan(settings, has_tasks=has_tasks), rewards=rewarded.rewards)
    calls = _with_rewards(survey.calls, rewarded, compared)
    credited = _credit(source, survey.answers, calls, compared, ledger, plan)
    newest = survey.calls["policy_version"].max()
    return Draft(
        rewarded=rewarded,
        plan=plan,
        compared=compared,
        calls=_judged(calls, credited, plan),
        terms=credited.terms,
        parts=compared.select("rollout", *ROLLOUT_KEY).join(credited.parts, on="rollout").drop("rollout"),
        limits=Limits(
            newest if isinstance(newest, int) else None,
            settings.max_staleness,
            settings.max_tokens,
            settings.keep_zero_spread,
        ),
        others=_judged_others(survey, rewarded),
    )


def _judged_others(survey: Survey, rewarded: Rewarded) -> pl.DataFrame:
    """A call of a model that is not ours is not selected; where nothing came from a policy server, it lacks tokens."""
    others = survey.others.join(
        rewarded.rollouts.select(*ROLLOUT_KEY, pl.col("reason").alias("rollout_reason")), on=ROLLOUT_KEY, how="left"
    )
    is_foreign = pl.lit(survey.calls.height > 0) & ~pl.col("is_bare_call")
    reason = (
        pl.when(is_foreign)
        .then(pl.lit("not_selected"))
        .when(pl.col("redacted").fill_null(False))
        .then(pl.lit("redacted"))
        .when(pl.col("rollout_id").is_null())
        .then(pl.lit("no_boundary"))
        .otherwise(pl.coalesce("rollout_reason", pl.lit("no_token_ids")))
    )
    return others.select(*ROLLOUT_KEY, *SPAN_KEY, reason.alias("reason"))


def _compared(source: Source, survey: Survey, rewarded: Rewarded) -> pl.DataFrame:
    present = rewarded.rollouts.filter(pl.col("reason").is_null() & (pl.col("n_calls") > 0)).with_row_index("rollout")
    firsts = first_calls(survey.calls, present.filter(pl.col("task_id").is_null()))
    return with_groups(present, hash_prompts(firsts, _prompts(source, firsts, survey.answers)))


def _prompts(source: Source, calls: pl.DataFrame, answers: pl.DataFrame) -> Iterator[pl.DataFrame]:
    for part in calls.iter_slices(1024):
        yield read_payload(source, part, columns=(*SPAN_KEY, "prompt_ids"), answers=answers)


def _with_rewards(calls: pl.DataFrame, rewarded: Rewarded, compared: pl.DataFrame) -> pl.DataFrame:
    """All calls with what their rollout says, and their own rewards."""
    names = [reward.name for reward in rewarded.rewards]
    of_rollout = rewarded.rollouts.select(*ROLLOUT_KEY, pl.col("reason").alias("rollout_reason"), "task_id")
    of_group = compared.select(*ROLLOUT_KEY, "rollout", "group_id", *(rollout_column(name) for name in names))
    return (
        calls.drop("task_id")
        .join(of_rollout, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .join(of_group, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .join(rewarded.of_calls, on=SPAN_KEY, how="left", maintain_order="left")
    )


def _credit(
    source: Source, answers: pl.DataFrame, calls: pl.DataFrame, compared: pl.DataFrame, ledger: Ledger, plan: Plan
) -> Credited:
    credited = calls.filter(pl.col("rollout").is_not_null())
    if plan.needs_states:
        unnamed = credited.filter(pl.col("state_key").is_null()).select(*ROLLOUT_KEY, *SPAN_KEY, "store")
        credited = with_states(credited, hash_prompts(unnamed, _prompts(source, unnamed, answers)))
    columns = [column(reward.name) for reward in plan.rewards for column in (step_column, rollout_column)]
    states = ["state"] if plan.needs_states else []
    facts = compared.select(
        "rollout",
        pl.col("group_id").rank("dense").cast(pl.UInt32).alias("group"),
        "run_id",
        "end_ns",
        *ROLLOUT_KEY,
    ).sort(ROLLOUT_KEY)
    history = ledger.history().join(facts, on=ROLLOUT_KEY, how="anti")
    return assign_advantages(
        credited.select("rollout", "position", "agent", "turn", *states, *columns), facts, history, plan
    )


def _judged(calls: pl.DataFrame, credited: Credited, plan: Plan) -> pl.DataFrame:
    """Adds reason, reward, return, advantage and drop. A compared call that nothing gave a value lacks a reward."""
    steps = {step_column(reward.name): reward.weight for reward in plan.rewards}
    own = pl.when(pl.any_horizontal(pl.col(name).is_not_null() for name in steps)).then(
        pl.sum_horizontal(pl.col(name) * weight for name, weight in steps.items())
    )
    without_value = pl.when(pl.col("rollout").is_not_null() & pl.col("return").is_null()).then(pl.lit("no_reward"))
    return (
        calls.join(credited.calls, on=["rollout", "position"], how="left", maintain_order="left")
        .with_columns(pl.coalesce(call_reason(), without_value).alias("reason"), own.alias("reward"))
        .drop(steps, [rollout_column(reward.name) for reward in plan.rewards])
    )

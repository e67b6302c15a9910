"""The middle of a dataset: rewards, groups, credit and reasons of every surveyed call, before any token is read."""

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from trainspan_schemas.errors import UsageError
from trainspan_schemas.functions import is_function_name, load_function
from trainspan_schemas.settings import DatasetSettings

from .credit import CREDITS, Credit, assign_credit
from .frames import ROLLOUT_KEY, SPAN_KEY
from .grouping import compare, first_calls, hash_first_prompts, with_groups
from .ledger import Ledger
from .payload import read_payload
from .rewards import bind_rewards
from .rows import Limits
from .source import Source
from .stored import reward_by_function
from .survey import Survey
from .trainability import call_reason, rollout_reason

__all__ = ["Draft", "Rewarded", "draft_dataset"]


@dataclass(frozen=True, slots=True)
class Rewarded:
    """Rollouts with their rewards and reasons."""

    rollouts: pl.DataFrame
    """The rollout table with `rollout_reward`, `reward`, `reward_failed`, `reason`."""
    of_calls: pl.DataFrame
    """trace_id, span_id, `reward` of single calls."""
    in_vain: int = 0
    unmatched: int = 0
    function_error: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What is decided without tokens."""

    rewarded: Rewarded
    baseline: str
    """Its name; the default is settled."""
    compared: pl.DataFrame
    """The complete, rewarded rollouts with `group_id`, `center`, `scale` and `drop`."""
    calls: pl.DataFrame
    """All calls with `reason` (as far as it shows), `reward`, `return`, `advantage` and `drop`."""
    limits: Limits

    @property
    def sound(self) -> pl.DataFrame:
        """The calls with nothing against them so far."""
        return self.calls.filter(pl.col("reason").is_null())


def draft_dataset(source: Source, survey: Survey, settings: DatasetSettings, ledger: Ledger) -> Draft:
    """Rewards, compares and credits what was surveyed.

    Raises UsageError for unknown names of credit and baseline, and for functions that do not keep to their form.
    """
    credit = _credit(settings.credit)
    rewarded = _reward(source, survey, settings)
    baseline, compared = _compare(source, survey, rewarded, settings, ledger)
    newest = survey.calls["policy_version"].max()
    return Draft(
        rewarded=rewarded,
        baseline=baseline,
        compared=compared,
        calls=_judge(survey, rewarded, compared, credit, settings),
        limits=Limits(
            newest if isinstance(newest, int) else None,
            settings.max_staleness,
            settings.max_tokens,
            settings.keep_zero_spread,
        ),
    )


def _credit(name: str) -> Credit:
    if is_function_name(name):
        return load_function(name)
    if name not in CREDITS:
        raise UsageError(f"no credit {name!r}: take one of {', '.join(CREDITS)} or module:function")
    return CREDITS[name]


def _reward(source: Source, survey: Survey, settings: DatasetSettings) -> Rewarded:
    """Rewards from the stored evaluations, or from the user's function where one is set."""
    if settings.reward is None:
        bound = bind_rewards(
            survey.evaluations, survey.calls, survey.spans, survey.twins, survey.rollouts, settings.reward_name
        )
        of_calls = bound.of_calls()
        per_rollout = (
            survey.calls.select(*ROLLOUT_KEY, *SPAN_KEY)
            .join(of_calls, on=SPAN_KEY)
            .sort(*SPAN_KEY)
            .group_by(ROLLOUT_KEY, maintain_order=True)
            .agg(pl.col("reward").sum().alias("calls_reward"))
        )
        rollouts = survey.rollouts.join(bound.of_rollouts(), on=ROLLOUT_KEY, how="left", maintain_order="left")
        rollouts = rollouts.join(per_rollout, on=ROLLOUT_KEY, how="left", maintain_order="left")
        total = pl.sum_horizontal("rollout_reward", "calls_reward")
        either = pl.col("rollout_reward").is_not_null() | pl.col("calls_reward").is_not_null()
        rollouts = rollouts.with_columns(
            pl.when(either).then(total).alias("reward"), pl.lit(False).alias("reward_failed")
        ).drop("calls_reward")
        return Rewarded(_with_reason(rollouts), of_calls, bound.in_vain, bound.unmatched)
    assumed = survey.rollouts.with_columns(pl.lit(0.0).alias("reward"), pl.lit(False).alias("reward_failed"))
    eligible = survey.rollouts.filter(_with_reason(assumed)["reason"].is_null())
    function = load_function(settings.reward)
    said = reward_by_function(function, settings.reward_name, source, survey, eligible)
    rollouts = survey.rollouts.join(said.rewards, on=ROLLOUT_KEY, how="left", maintain_order="left").with_columns(
        pl.col("rollout_reward").alias("reward"), pl.col("reward_failed").fill_null(False)
    )
    nothing = pl.DataFrame(schema={"trace_id": pl.String, "span_id": pl.String, "reward": pl.Float64})
    return Rewarded(_with_reason(rollouts), nothing, function_error=said.first_error)


def _with_reason(rollouts: pl.DataFrame) -> pl.DataFrame:
    return rollouts.with_columns(rollout_reason().alias("reason"))


def _compare(
    source: Source, survey: Survey, rewarded: Rewarded, settings: DatasetSettings, ledger: Ledger
) -> tuple[str, pl.DataFrame]:
    """Groups and baseline over the complete, rewarded rollouts that made calls."""
    present = rewarded.rollouts.filter(pl.col("reason").is_null() & (pl.col("n_calls") > 0)).with_row_index("rollout")
    without_task = present.filter(pl.col("task_id").is_null())
    firsts = first_calls(survey.calls, without_task)
    hashes = hash_first_prompts(firsts, _payloads(source, firsts))
    return compare(with_groups(present, hashes), settings.baseline, ledger)


def _payloads(source: Source, firsts: pl.DataFrame) -> Iterator[pl.DataFrame]:
    for part in firsts.iter_slices(1024):
        yield read_payload(source, part, columns=(*SPAN_KEY, "prompt_ids"))


def _judge(
    survey: Survey, rewarded: Rewarded, compared: pl.DataFrame, credit: Credit, settings: DatasetSettings
) -> pl.DataFrame:
    """All calls with `reason` (as far as it shows without tokens), `reward`, `return`, `advantage` and `drop`."""
    of_rollout = rewarded.rollouts.select(*ROLLOUT_KEY, pl.col("reason").alias("rollout_reason"), "task_id")
    of_group = compared.select(*ROLLOUT_KEY, "rollout", "group_id", "rollout_reward")
    calls = (
        survey.calls.drop("task_id")
        .join(of_rollout, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .join(of_group, on=ROLLOUT_KEY, how="left", maintain_order="left")
        .join(rewarded.of_calls, on=SPAN_KEY, how="left", maintain_order="left")
        .with_columns(call_reason().alias("reason"))
    )
    credited = credit(
        calls.filter(pl.col("rollout").is_not_null()).select(
            "rollout", "position", pl.col("reward").alias("step_reward"), "rollout_reward"
        ),
        settings.gamma,
    )
    _check_credit(settings.credit, credited)
    values = assign_credit(credited, compared).select("rollout", "position", "return", "advantage", "drop")
    return calls.join(values, on=["rollout", "position"], how="left", maintain_order="left")


def _check_credit(name: str, credited: pl.DataFrame) -> None:
    if missing := {"rollout", "position", "return"} - set(credited.columns):
        raise UsageError(f"credit {name!r} returned no column {sorted(missing)[0]!r}")
    if credited.height and not credited["return"].is_finite().all():
        raise UsageError(f"credit {name!r} returned a value that is not finite")

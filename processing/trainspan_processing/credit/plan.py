"""The credit plan: the estimator of advantages, and how several rewards are combined. Parsed from the settings."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import polars as pl

from trainspan_processing.credit.baselines import BASELINES, WITH_GROUPS, WITH_HISTORY, Baseline
from trainspan_processing.credit.rtmc import RTMC, check_rtmc
from trainspan_processing.credit.rules import CREDITS, Credit
from trainspan_processing.credit.vine import VINE, check_vine
from trainspan_processing.rewards.names import RewardName, reward_names
from trainspan_schemas.agents.functions import is_function_name, load_function
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import DatasetError, UsageError
from trainspan_schemas.telemetry.status import KIND_PREFIX, kind_named

__all__ = ["CreditPlan", "Estimator", "looks_at_calls", "make_plan", "plan_for"]

GIGPO: Final = "gigpo"
PER_AGENT: Final = "per_agent"
_OF_CALLS: Final = ("step", "return_to_go")
"""The named credits by which a call's own reward is that of the call."""
ANY_AGENT: Final = "*"


@dataclass(frozen=True, slots=True)
class Estimator:
    """Credit × baseline, by name."""

    credit: str
    """A name of CREDITS, `gigpo`, `rtmc`, `vine`, or `module:function`."""
    baseline: str
    """A name of BASELINES, or `module:function`."""

    def __str__(self) -> str:
        return f"{self.credit}+{self.baseline}"


@dataclass(frozen=True, slots=True)
class CreditPlan:
    """How the rewards of rollouts become advantages of calls."""

    estimator: Estimator
    """The estimator of all agents; with `per_agent`, of every agent missing in `by_agent`."""
    rewards: tuple[RewardName, ...] = (RewardName("reward"),)
    per_agent: bool = False
    by_agent: Mapping[str, Estimator] = field(default_factory=dict)
    """Name of an agent, or `kind:NAME` for all calls of a kind, which comes before the agent's name."""
    combine: str = "sum"
    group_over: str = "rollouts"
    step_by: str = "turn"
    gamma: float = 1.0
    episode_weight: float = 1.0
    state_weight: float = 1.0

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        return (self.estimator, *self.by_agent.values())

    @property
    def kinds(self) -> list[str]:
        """The kinds of calls that have an estimator of their own."""
        return [name.removeprefix(KIND_PREFIX) for name in self.by_agent if name.startswith(KIND_PREFIX)]

    def with_share(self, calls: pl.DataFrame) -> pl.DataFrame:
        """Adds `share`, the agent or `kind:NAME` whose calls a call is credited and compared with; needs agent, and with `kinds`
        call_kind."""
        if not self.kinds:
            return calls.with_columns(pl.col("agent").alias("share"))
        kind = pl.col("call_kind").cast(pl.String)
        named = pl.when(kind.is_in(self.kinds)).then(KIND_PREFIX + kind)
        return calls.with_columns(named.otherwise(pl.col("agent").cast(pl.String)).alias("share"))

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(estimator.baseline for estimator in self.estimators)

    @property
    def needs_states(self) -> bool:
        return any(estimator.credit in (GIGPO, RTMC) for estimator in self.estimators)

    @property
    def needs_actions(self) -> bool:
        return any(estimator.credit == RTMC for estimator in self.estimators)

    @property
    def needs_values(self) -> bool:
        """Whether measured values of states are used."""
        return any(estimator.credit == VINE for estimator in self.estimators)

    @property
    def needs_history(self) -> bool:
        """Whether advantages depend on earlier datasets."""
        return any(
            estimator.baseline in WITH_HISTORY or is_function_name(estimator.baseline) for estimator in self.estimators
        )


def make_plan(settings: DatasetSettings, *, has_tasks: bool) -> CreditPlan:
    """The plan that the settings ask for. The default baseline is `grpo` if any rollout has a task or calls are compared
    within groups, else `running`.

    Raises UsageError for an unknown name, and for a combination of credit and baseline that makes no sense.
    """
    if not 0 <= settings.gamma <= 1:
        raise UsageError(f"gamma = {settings.gamma:g}: it must be from 0 to 1")
    for name in ("episode_weight", "state_weight"):
        if not math.isfinite(value := getattr(settings, name)):
            raise UsageError(f"{name} = {value:g} is no weight")
    per_agent = settings.credit == PER_AGENT
    in_groups = has_tasks or settings.credit in (GIGPO, RTMC) or settings.group_over != "rollouts"
    of_group = "dr_grpo" if settings.credit in (VINE, RTMC) else "grpo"
    baseline = settings.baseline or (of_group if in_groups else "running")
    default = _default(settings, baseline)
    by_agent = _by_agent(settings.agent_credit or "", default)
    if by_agent and not per_agent:
        raise UsageError(
            f"agent_credit = {settings.agent_credit!r} needs credit = {PER_AGENT!r}, not {settings.credit!r}"
        )
    plan = CreditPlan(
        estimator=by_agent.pop(ANY_AGENT, default),
        rewards=reward_names(settings.reward_name),
        per_agent=per_agent,
        by_agent=by_agent,
        combine=settings.combine,
        group_over=settings.group_over,
        step_by=settings.step_by,
        gamma=settings.gamma,
        episode_weight=settings.episode_weight,
        state_weight=settings.state_weight,
    )
    for estimator in plan.estimators:
        baseline_of(estimator)
        if estimator.credit not in (GIGPO, RTMC, VINE):
            credit_of(estimator)
        _check_pair(estimator, plan)
    return plan


def looks_at_calls(settings: DatasetSettings) -> bool:
    """Whether the credit of all calls depends on which call has a reward, and not only on their sum. Loads no function."""
    default = _default(settings, "")
    by_agent = {ANY_AGENT: default} | _by_agent(settings.agent_credit or "", default)
    return all(estimator.credit in _OF_CALLS or is_function_name(estimator.credit) for estimator in by_agent.values())


def _default(settings: DatasetSettings, baseline: str) -> Estimator:
    """The estimator of the agents that `agent_credit` does not name."""
    return Estimator("identical" if settings.credit == PER_AGENT else settings.credit, baseline)


def credit_of(estimator: Estimator) -> Credit:
    """The estimator's credit rule. Raises UsageError for an unknown name."""
    name = estimator.credit
    if is_function_name(name):
        return _guarded(f"credit {name!r}", load_function(name, "calls", "gamma"))
    if name not in CREDITS:
        known = ", ".join((*CREDITS, GIGPO, RTMC, VINE, PER_AGENT))
        raise UsageError(f"unknown credit {name!r}: use one of {known} or module:function")
    return CREDITS[name]


def baseline_of(estimator: Estimator) -> Baseline:
    """The estimator's baseline. Raises UsageError for an unknown name."""
    name = estimator.baseline
    if is_function_name(name):
        return _guarded(f"baseline {name!r}", load_function(name, "items"))
    if name not in BASELINES:
        raise UsageError(f"unknown baseline {name!r}: use one of {', '.join(BASELINES)} or module:function")
    return BASELINES[name]


def _guarded(what: str, function: Callable[..., Any]) -> Callable[..., pl.DataFrame]:
    """Wraps the user's function: DatasetError if it raises, UsageError if it does not return a frame."""

    def call(*arguments: Any) -> pl.DataFrame:
        try:
            result = function(*arguments)
        except Exception as error:
            raise DatasetError(f"{what} raised {type(error).__name__}: {error}") from error
        if not isinstance(result, pl.DataFrame):
            raise UsageError(
                f"{what} returned {result!r:.80}: it must return a Polars DataFrame (docs/processing.md, Credit)"
            )
        return result

    return call


def _check_pair(estimator: Estimator, plan: CreditPlan) -> None:
    """Refuses combinations that could be computed but make no sense."""
    if (check := {VINE: check_vine, RTMC: check_rtmc}.get(estimator.credit)) is not None:
        per_agent = plan.per_agent or bool(plan.by_agent)
        check(estimator.baseline, combine=plan.combine, group_over=plan.group_over, per_agent=per_agent)
        return
    if estimator.baseline in WITH_GROUPS or is_function_name(estimator.baseline):
        return
    known = f"{', '.join(WITH_GROUPS[:-1])} or {WITH_GROUPS[-1]}"
    if estimator.credit == GIGPO:
        raise UsageError(
            f"credit {GIGPO!r} compares calls from the same state, but baseline {estimator.baseline!r} does not: "
            f"use baseline {known}"
        )
    if estimator.baseline in WITH_HISTORY and plan.group_over == "calls" and estimator.credit != "step":
        raise UsageError(
            f"group_over = 'calls' pools the calls of a group, but baseline {estimator.baseline!r} compares with "
            f"earlier rollouts: use group_over = 'rollouts' or 'turns', or baseline {known}"
        )


def _by_agent(text: str, default: Estimator) -> dict[str, Estimator]:
    """Parses `planner=rloo,coder=return_to_go+grpo,*=rae`: each agent's baseline, or credit+baseline."""
    estimators: dict[str, Estimator] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        agent, separator, name = item.rpartition("=")
        if not separator or not agent or not name:
            raise UsageError(f"agent_credit has {item!r}; write agent=baseline or agent=credit+baseline")
        kind_named(agent)
        credit, plus, baseline = name.rpartition("+")
        estimators[agent] = Estimator(credit if plus else default.credit, baseline)
    return estimators


def plan_for(settings: DatasetSettings, rewards: Sequence[RewardName], compared: pl.DataFrame) -> CreditPlan:
    """The plan for these rollouts: the default baseline depends on whether any of them has a task."""
    has_tasks = compared.is_empty() or bool(compared["task_id"].is_not_null().any())
    return replace(make_plan(settings, has_tasks=has_tasks), rewards=tuple(rewards))

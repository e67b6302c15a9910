"""The result of `trainspan gate`: a candidate compared with a baseline, and what stands beside the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainspan_schemas.intervals import RewardEstimate

__all__ = ["EXIT_CODES", "GateResult", "GateSide", "GateVerdict", "TaskDecline", "Tripwire"]

GateVerdict = Literal["no decline", "worse", "no verdict"]
EXIT_CODES: Final[dict[GateVerdict, int]] = {"no decline": 0, "worse": 1, "no verdict": 2}


@dataclass(frozen=True, slots=True)
class GateSide:
    """The rollouts under one server."""

    url: str
    rollouts: int
    mean: float | None
    """Mean reward over tasks; None without a reward."""
    interval: tuple[float, float] | None
    """95 % interval of the mean."""
    failed: int
    """Rollouts that the agent failed or that took too long."""
    left_out: dict[str, int]
    """Status → rollouts that say nothing about the policy: their infrastructure or judge failed, or nobody rewarded them."""

    @classmethod
    def of(
        cls, url: str, rewards: RewardEstimate, failed: int, left_out: Mapping[str, int], rollouts: int
    ) -> "GateSide":
        return cls(url, rollouts, rewards.mean if rewards.n else None, rewards.interval, failed, dict(left_out))


@dataclass(frozen=True, slots=True)
class Tripwire:
    """A figure of both sides that a policy can move without getting better. It warns; the verdict does not depend on it."""

    name: str
    baseline: float | None
    """Mean over tasks; None if it is unknown."""
    candidate: float | None
    flagged: bool = False
    """Whether the sides differ beyond noise."""
    p: float | None = None
    """Of the two-sided permutation test within tasks."""
    unknown: str | None = None
    """Why it is unknown."""


@dataclass(frozen=True, slots=True)
class TaskDecline:
    """A task whose mean reward fell."""

    task_id: str
    baseline: float
    candidate: float


@dataclass(frozen=True, slots=True)
class GateResult:
    """The verdict on a candidate, with its figures."""

    run_id: str
    verdict: GateVerdict
    reason: str
    """The verdict in one line, with why."""
    level: float
    """Greatest probability of calling a candidate worse that is as good as the baseline."""
    n: int
    """Rollouts of each task under each server."""
    tasks: int
    """In the file."""
    used: int
    """Rolled out under both servers, in an order drawn by the run's id."""
    baseline: GateSide
    candidate: GateSide
    difference: float | None
    """Mean over tasks of the candidate's reward minus the baseline's."""
    interval: tuple[float, float] | None
    """Its 95 % interval, as if the number of tasks had been fixed."""
    detectable: float | None
    """A fall of the mean that four of five gates on as many tasks find, if it is of rollouts that get the least reward: by the normal
    approximation. None before all tasks are used, or if no fall is found so often."""
    evidence: float
    """That the candidate is worse: greatest value of the martingale over the tasks."""
    decisive: float
    """The evidence at which it is worse, at any time."""
    p_reward: float | None
    """Of the permutation test, once all tasks are used."""
    p_finished: float | None
    """The same of the rollouts that ended with a reward; None if all did."""
    tripwires: tuple[Tripwire, ...]
    declines: tuple[TaskDecline, ...]
    """The greatest ones first."""
    seconds: float

    def __post_init__(self) -> None:
        """Takes the values of a JSON object as well."""
        for name in ("baseline", "candidate"):
            object.__setattr__(self, name, _typed(GateSide, getattr(self, name)))
        object.__setattr__(self, "tripwires", tuple(_typed(Tripwire, one) for one in self.tripwires))
        object.__setattr__(self, "declines", tuple(_typed(TaskDecline, one) for one in self.declines))
        object.__setattr__(self, "interval", None if self.interval is None else tuple(self.interval))

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


def _typed(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    values = dict(value)
    if isinstance(values.get("interval"), list):
        values["interval"] = tuple(values["interval"])
    return kind(**values)

"""Values of states and advantages of calls from branches.

V(s) is the mean reward of the branches from s, of a rollout's group for its first state, and its reward after its last call.
The advantage of call k is V(s_k+1) − V(s_k). VinePPO, arXiv 2410.01679, section 4, here for whole calls.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from trainspan_schemas.intervals import RewardEstimate

__all__ = ["BranchedCall", "BranchedRollout", "StateBranches", "StateValue", "measure_rollout"]


@dataclass(frozen=True, slots=True)
class StateBranches:
    """The branches from one state."""

    rewards: Sequence[float]
    """Of those that have one."""
    diverged: int = 0
    """How many did not reach the state."""
    policies: tuple[str, ...] = ()
    """Name and version of every policy that sampled for them."""


@dataclass(frozen=True, slots=True)
class StateValue:
    """The value of a state."""

    mean: float
    interval: tuple[float, float] | None
    """95 %; None: too few rollouts."""
    n: int
    """Rewarded rollouts it is the mean of."""
    by: str
    """`branches`, `group`, or `reward` (after the last call)."""
    diverged: int = 0
    """Branches that did not reach the state."""
    policies: tuple[str, ...] = ()
    """Name and version of every policy that sampled for the branches."""

    @classmethod
    def of(
        cls, rewards: Sequence[float], by: str, diverged: int = 0, policies: tuple[str, ...] = ()
    ) -> "StateValue | None":
        """From the rewards of independent rollouts; None without any."""
        if not rewards:
            return None
        estimate = RewardEstimate.of([reward] for reward in rewards)
        return cls(statistics.mean(rewards), estimate.interval, len(rewards), by, diverged, policies)


@dataclass(frozen=True, slots=True)
class BranchedCall:
    """One call of a rollout, with the value of the state before it."""

    call: int
    trace_id: str
    span_id: str
    agent: str | None
    policy_version: int | None
    surprisal: float | None
    """Mean of −log p of the sampled tokens, in nats."""
    value: StateValue | None
    advantage: float | None
    """V after the call − V before it; None if either is unknown."""
    interval: tuple[float, float] | None
    """Of the advantage, 95 %."""
    diverged: int
    """Branches from the state before it that did not get there."""
    policies: tuple[str, ...]
    """Name and version of every policy that sampled for the branches from the states before and after it."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BranchedRollout:
    """The calls of a rollout with their values."""

    rollout_id: str
    attempt: int
    task_id: str | None
    reward: float
    calls: tuple[BranchedCall, ...]

    def record(self) -> dict[str, Any]:
        return asdict(self)


def measure_rollout(
    rollout: Mapping[str, Any],
    states: pl.DataFrame,
    group: Sequence[float],
    branches: Mapping[int, StateBranches],
) -> BranchedRollout:
    """The values of a rollout's states.

    `rollout` has rollout_id, attempt, task_id and reward; `states` are its STATES; `group` are the rewards of its group,
    its own among them; `branches` are those of each state.
    """
    reward, end = float(rollout["reward"]), states.height
    values = {
        call: StateValue.of(own.rewards, "branches", own.diverged, own.policies)
        for call, own in branches.items()
        if call < end
    }
    if values.get(0) is None and len(group) > 1:
        values[0] = StateValue.of(group, "group")
    values[end] = StateValue(reward, (reward, reward), 1, "reward")
    calls = []
    for row in states.iter_rows(named=True):
        before, after = values.get(row["call"]), values.get(row["call"] + 1)
        known = before is not None and after is not None
        surprisal = row["surprisal"]
        calls.append(
            BranchedCall(
                **{name: row[name] for name in ("call", "trace_id", "span_id", "agent", "policy_version")},
                surprisal=surprisal if surprisal is not None and math.isfinite(surprisal) else None,
                value=before,
                advantage=after.mean - before.mean if known else None,  # type: ignore[union-attr]
                interval=_difference(before, after) if known else None,  # type: ignore[arg-type]
                diverged=branches[row["call"]].diverged if row["call"] in branches else 0,
                policies=tuple(sorted({name for value in (before, after) if value for name in value.policies})),
            )
        )
    return BranchedRollout(rollout["rollout_id"], rollout["attempt"], rollout["task_id"], reward, tuple(calls))


def _difference(before: StateValue, after: StateValue) -> tuple[float, float] | None:
    """The interval of a difference from those of its parts (Newcombe 1998; Zou and Donner 2008)."""
    if before.interval is None or after.interval is None:
        return None
    (low, high), (low_after, high_after) = before.interval, after.interval
    gap = after.mean - before.mean
    down = math.hypot(after.mean - low_after, high - before.mean)
    up = math.hypot(high_after - after.mean, before.mean - low)
    return gap - down, gap + up

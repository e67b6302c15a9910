"""Values of states and advantages of calls from branches.

V(s) is the mean reward of the branches from s, of a rollout's group for its first state, and its reward after its last call.
The advantage of call k is V(s_k+1) − V(s_k). VinePPO, arXiv 2410.01679, section 4, here for whole calls.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import polars as pl

from trainspan_schemas.intervals import RewardEstimate, t_interval

__all__ = ["BranchedCall", "BranchedRollout", "StateBranches", "StateValue", "measure_rollout", "two_values"]


@dataclass(frozen=True, slots=True)
class StateBranches:
    """The branches from one state."""

    rewards: Sequence[float]
    """Of those that have one, without those that diverged."""
    status: Mapping[str, int] = field(default_factory=dict)
    """Status → how many ended so."""
    unrewarded: int = 0
    """How many ended without a reward, as they do by the policy's doing: ok, in an error of agent or judge, or by a timeout.
    What they would have earned is unknown, and a mean without them would be that of the branches that went well."""
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
    policies: tuple[str, ...] = ()
    """Name and version of every policy that sampled for the branches."""

    @classmethod
    def of(cls, branches: StateBranches, by: str, two: tuple[float, float] | None) -> "StateValue | None":
        """From the rewards of independent rollouts; None without any. `two`: see `two_values`."""
        if not branches.rewards:
            return None
        mean = statistics.mean(branches.rewards)
        return cls(mean, _interval(branches.rewards, two), len(branches.rewards), by, branches.policies)

    @classmethod
    def of_branches(cls, branches: StateBranches, two: tuple[float, float] | None) -> "StateValue | None":
        """None without a rewarded branch, or if what some branches would have earned is unknown."""
        if branches.unrewarded:
            return None
        return cls.of(branches, "branches", two)


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
    status: Mapping[str, int]
    """Status → branches from the state before it that ended so; `diverged` ones did not get there."""
    unrewarded: int
    """Branches from there that ended without a reward: if any, the state has no value."""
    policies: tuple[str, ...]
    """Name and version of every policy that sampled for the branches from the states before and after it."""


@dataclass(frozen=True, slots=True)
class BranchedRollout:
    """The calls of a rollout with their values."""

    rollout_id: str
    attempt: int
    task_id: str | None
    reward: float
    is_other_policy: bool
    """Whether another version of the policy sampled the branches: credit `vine` uses no such values."""
    calls: tuple[BranchedCall, ...]

    def record(self) -> dict[str, object]:
        return asdict(self)


def measure_rollout(
    rollout: Mapping[str, Any],
    states: pl.DataFrame,
    group: StateBranches | None,
    branches: Mapping[int, StateBranches],
    two: tuple[float, float] | None,
    *,
    is_other_policy: bool,
) -> BranchedRollout:
    """The values of a rollout's states.

    `rollout` has rollout_id, attempt, task_id and reward; `states` are its STATES; `group` is its group, itself
    included; `branches` are those of each state. If other policy versions sampled them, the group gives no value: it is that of
    another policy. `two`: see `two_values`.
    """
    reward, end = float(rollout["reward"]), states.height
    values = {call: StateValue.of_branches(of_state, two) for call, of_state in branches.items() if call < end}
    if values.get(0) is None and group is not None and len(group.rewards) > 1 and not is_other_policy:
        values[0] = StateValue.of(group, "group", two)
    values[end] = StateValue(reward, (reward, reward), 1, "reward")
    calls = []
    for row in states.iter_rows(named=True):
        before, after = values.get(row["call"]), values.get(row["call"] + 1)
        known = before is not None and after is not None
        of_state = branches.get(row["call"])
        surprisal = row["surprisal"]
        calls.append(
            BranchedCall(
                **{name: row[name] for name in ("call", "trace_id", "span_id", "agent", "policy_version")},
                surprisal=surprisal if surprisal is not None and math.isfinite(surprisal) else None,
                value=before,
                advantage=after.mean - before.mean if known else None,  # type: ignore[union-attr]
                interval=_difference(before, after) if known else None,  # type: ignore[arg-type]
                status=dict(of_state.status) if of_state else {},
                unrewarded=of_state.unrewarded if of_state else 0,
                policies=tuple(sorted({name for value in (before, after) if value for name in value.policies})),
            )
        )
    return BranchedRollout(
        rollout["rollout_id"], rollout["attempt"], rollout["task_id"], reward, is_other_policy, tuple(calls)
    )


def two_values(rewards: Iterable[float]) -> tuple[float, float] | None:
    """The two values that the rewards of a whole run have, so that their mean is a rate; None if there are others.

    Those are 0 and 1, also if only one of them occurs, or any two that occur more than once each: numbers that only happen to
    be few do not repeat.
    """
    counts = Counter(rewards)
    if counts.keys() <= {0.0, 1.0}:
        return 0.0, 1.0
    if len(counts) == 2 and min(counts.values()) > 1:
        return min(counts), max(counts)
    return None


def _interval(rewards: Sequence[float], two: tuple[float, float] | None) -> tuple[float, float] | None:
    """95 %: Wilson's for the rate of the greater of two values, else Student's; None if it is unknown."""
    if two is None:
        return t_interval(rewards)
    low, high = two
    ends = RewardEstimate.of([(reward - low) / (high - low)] for reward in rewards).interval
    return None if ends is None else (low + (high - low) * ends[0], low + (high - low) * ends[1])


def _difference(before: StateValue, after: StateValue) -> tuple[float, float] | None:
    """The interval of a difference from those of its parts (Newcombe 1998; Zou and Donner 2008)."""
    if before.interval is None or after.interval is None:
        return None
    (low, high), (low_after, high_after) = before.interval, after.interval
    gap = after.mean - before.mean
    down = math.hypot(after.mean - low_after, high - before.mean)
    up = math.hypot(high_after - after.mean, before.mean - low)
    return gap - down, gap + up

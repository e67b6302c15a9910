"""Names of rewards, their weights, and the columns that hold their values."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys

__all__ = ["RewardName", "filled_names", "reward_names", "rollout_column", "step_column"]


@dataclass(frozen=True, slots=True)
class RewardName:
    """One of the evaluation names that make up the reward."""

    name: str
    weight: float = 1.0
    may_be_missing: bool = False
    """Whether a rollout without it is still trained. In a sum it then adds nothing; if each reward is compared by itself (gdpo), the
    rollout is left out of this reward's comparison."""
    is_penalty: bool = False
    """Whether it is what a rule takes away: a rollout without it has none, and is compared as 0."""


def step_column(name: str) -> str:
    """The column with the calls' own rewards with this name."""
    return f"step:{name}"


def rollout_column(name: str) -> str:
    """The column with the rollouts' own rewards with this name."""
    return f"rollout:{name}"


def filled_names(rewards: Sequence[RewardName]) -> list[str]:
    """The names that a label or a status gives its reward: the required ones; all of them if none is required."""
    required = [reward.name for reward in rewards if not reward.may_be_missing]
    return required or [reward.name for reward in rewards]


def reward_names(text: str) -> tuple[RewardName, ...]:
    """Parses `correct=1,style=0.2,tools?=0.1`: names with weights (default 1); `?` marks rewards that may be missing."""
    rewards = []
    for item in text.split(","):
        name, separator, weight = item.strip().rpartition("=") if "=" in item else (item.strip(), "", "1")
        try:
            number = float(weight)
        except ValueError:
            raise UsageError(f"reward_name {text!r}: {weight!r} is not a weight; write name=0.5") from None
        if not name.rstrip("?"):
            raise UsageError(f"reward_name {text!r} has an empty name; write name or name=weight,name=weight")
        if name.rstrip("?") in keys.MEASUREMENTS:
            raise UsageError(f'reward_name {text!r}: {name} is what branches measured, no reward; use credit = "vine"')
        rewards.append(RewardName(name.rstrip("?"), number, name.endswith("?")))
        del separator
    if len({item.name for item in rewards}) < len(rewards):
        raise UsageError(f"reward_name {text!r} names a reward twice")
    if all(item.may_be_missing for item in rewards) and len(rewards) == 1:
        raise UsageError(f"reward_name {text!r}: the only reward cannot be optional; leave the ? out")
    return tuple(rewards)

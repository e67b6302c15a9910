"""Rewarded rollouts to choose examples from, by group, and the resulting examples."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainspan_processing.credit.baselines import ABSOLUTE, RELATIVE
from trainspan_processing.export.conversations import RecordedCall
from trainspan_schemas.files.durable import JsonObject

__all__ = ["CallsOf", "Examples", "RewardedRollout", "are_equal", "kept_calls", "offered_tools", "reaches"]

CallsOf = Callable[[tuple[str, int]], Sequence[RecordedCall]]


@dataclass(frozen=True, slots=True)
class RewardedRollout:
    """A rewarded rollout."""

    rollout_id: str
    attempt: int
    group: str
    """Run, round and task."""
    reward: float
    has_task: bool = True

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout_id, self.attempt


@dataclass(slots=True)
class Examples:
    """The examples made from the groups."""

    rows: list[JsonObject] = field(default_factory=list)
    """Rows in TRL's format."""
    sources: list[JsonObject] = field(default_factory=list)
    """The source rollouts of each row."""
    groups: int = 0
    groups_used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason → number of groups or calls without a row."""


def are_equal(left: float, right: float) -> bool:
    """Whether two rewards differ by no more than the rounding of sums, as for credit."""
    return math.isclose(left, right, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def reaches(reward: float, least: float) -> bool:
    return reward >= least or are_equal(reward, least)


def kept_calls(calls: Sequence[RecordedCall], agents: frozenset[str], skipped: Counter[str]) -> list[RecordedCall]:
    """The calls that make examples; counts the others in `skipped`."""
    reasons = [_why_not(call, agents) for call in calls]
    skipped.update(reason for reason in reasons if reason)
    return [call for call, reason in zip(calls, reasons, strict=True) if reason is None]


def _why_not(call: RecordedCall, agents: frozenset[str]) -> str | None:
    if agents and call.agent not in agents:
        return "not_selected"
    return call.flaw if call.is_whole else "cut_off"


def offered_tools(call: RecordedCall) -> JsonObject:
    return {"tools": [json.loads(tool) for tool in call.tools]} if call.tools else {}

"""What the labels on a page are about."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainspan_viewer.queries.rollout.group import GroupModel, LargeGroup
from trainspan_viewer.queries.rollout.rollout import RolloutModel
from trainspan_viewer.queries.rollout.tokens import TokensModel

__all__ = ["RolloutKey", "Subject", "call_subject", "group_subject", "rollout_subject"]

RolloutKey = tuple[str, int]
"""Rollout id and attempt."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A rollout, a call of it, or the rollouts of a group."""

    rollouts: Sequence[RolloutKey]
    """One, or those of the group."""
    span_id: str | None = None
    """Of the call."""

    @property
    def is_group(self) -> bool:
        return len(self.rollouts) > 1


def group_subject(model: GroupModel | LargeGroup) -> Subject | None:
    """None if it is too large to be read, or has one rollout."""
    if isinstance(model, LargeGroup) or len(model.group.keys) < 2:
        return None
    return Subject(model.group.keys)


def rollout_subject(model: RolloutModel) -> Subject | None:
    """None for a rollout that has not ended."""
    account = model.account
    return None if account.status is None else Subject([(account.rollout_id, account.attempt)])


def call_subject(model: TokensModel) -> Subject | None:
    account = model.account
    return None if account.status is None else Subject([(account.rollout_id, account.attempt)], model.call.span_id)

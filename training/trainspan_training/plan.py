"""Rows → optimizer steps → micro-batches.

A rollout's rows never part: they stand in one step, so that weights per rollout are exact. Rollouts of a group stand
together where the number of steps allows, since they share their first tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .batches import MicroBatch, WeightedRow, dummy
from .forwarding import Forwarding
from .loss_weights import Rule, StepCall, apply
from .rows import Row
from .transitions import Call
from .tree import unique_tokens

__all__ = ["Step", "plan_steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    rollouts: int
    rows: int
    trained: int
    """Tokens in the loss."""
    forwarded: int
    """Tokens that go through the model, without padding."""
    padded: int
    """The same with padding."""
    unique: int
    """Tokens of the prefix tree of all rows: the fewest that could be forwarded."""

    def share(self, rank: int, size: int) -> "Step":
        """The part of one of `size` processes: every one gets the same number of micro-batches."""
        mine = list(self.micro_batches[rank::size])
        mine += [dummy(self.trained)] * (-(-len(self.micro_batches) // size) - len(mine))
        return replace(self, micro_batches=tuple(mine))


def plan_steps(
    rows: Sequence[Row],
    calls: Sequence[Call],
    *,
    steps: int,
    rule: Rule,
    forwarding: Forwarding,
    rng: np.random.Generator,
) -> list[Step]:
    """Splits whole rollouts into at most `steps` steps of about equal numbers of rollouts; groups are shuffled.

    `rows` were made of `calls`, whose indexes they hold. Raises TrainingError for a rule that cannot be used.
    """
    by_rollout: dict[str, list[Row]] = {}
    for row in rows:
        by_rollout.setdefault(row.rollout, []).append(row)
    groups: dict[str, list[str]] = {}
    for rollout, own in by_rollout.items():
        groups.setdefault(own[0].group, []).append(rollout)
    names = list(groups)
    ordered = [rollout for index in rng.permutation(len(names)) for rollout in groups[names[index]]]
    parts = np.array_split(np.arange(len(ordered)), min(steps, len(ordered))) if ordered else []
    return [_step([by_rollout[ordered[index]] for index in part], calls, rule, forwarding) for part in parts]


def _step(rollouts: Sequence[Sequence[Row]], calls: Sequence[Call], rule: Rule, forwarding: Forwarding) -> Step:
    rows = [row for own in rollouts for row in own]
    trained = sum(row.n_trained for row in rows)
    weight_of = _weights(rows, calls, rule)
    weighted = [WeightedRow(row, np.array([weight_of[int(call)] for call in row.calls]) * trained) for row in rows]
    batches = forwarding.cut(weighted, trained)
    return Step(
        micro_batches=tuple(batches),
        rollouts=len(rollouts),
        rows=len(rows),
        trained=trained,
        forwarded=sum(batch.n_tokens for batch in batches),
        padded=sum(batch.tokens.size for batch in batches),
        unique=unique_tokens(rows),
    )


def _weights(rows: Sequence[Row], calls: Sequence[Call], rule: Rule) -> dict[int, float]:
    """Weight of each call of a step, by its index in the dataset."""
    indexes = [int(index) for row in rows for index in dict.fromkeys(row.calls.tolist())]
    known = [
        StepCall(call.rollout, call.group, call.index, len(call.completion_ids), call.advantage, call.policy_version)
        for call in (calls[index] for index in indexes)
    ]
    return dict(zip(indexes, apply(rule, known), strict=True))

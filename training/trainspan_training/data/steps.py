"""Rows → optimizer steps → micro-batches.

A rollout's rows never part: they stand in one step, so that weights per rollout are exact. Rollouts of a group stand
together where the number of steps allows, since they share their first tokens. A plan holds no tokens: one process makes
it of all rows, and each makes micro-batches of its own rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainspan_training.data.cuts import Cut, unique_tokens
from trainspan_training.data.dataset import Call
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import Rule, StepCall, apply
from trainspan_training.data.micro_batches import MicroBatch, WeightedRow, dummy, make_batches
from trainspan_training.data.sequences import TokenSequence

__all__ = ["Step", "plan_steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    cuts: tuple[Cut, ...]
    """What is forwarded together: of a share, by one process."""
    weights: Mapping[int, Mapping[int, float]]
    """Of each row that is forwarded, by number: weight in the objective of each of its calls, by place in the dataset."""
    dummies: int
    """Micro-batches of nothing beside them."""
    micro_batches: tuple[MicroBatch, ...]
    """None before `build`."""
    rollouts: int
    """Of all processes, as the figures below."""
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
        mine = self.cuts[rank::size]
        weights = {row: self.weights[row] for cut in mine for row in cut.rows}
        return replace(self, cuts=mine, weights=weights, dummies=-(-len(self.cuts) // size) - len(mine))

    def build(self, rows: Iterable[TokenSequence]) -> "Step":
        """The step with its micro-batches; `rows` are at least those that it forwards."""
        weighted = [
            WeightedRow(row, row.weighed(self.weights[row.number]) * self.trained)
            for row in rows
            if row.number in self.weights
        ]
        made = make_batches(self.cuts, weighted, self.trained)
        return replace(self, micro_batches=(*made, *[dummy(self.trained)] * self.dummies))


def plan_steps(
    rows: Sequence[TokenSequence],
    calls: Sequence[Call],
    *,
    steps: int,
    rule: Rule,
    layout: BatchLayout,
    rng: np.random.Generator,
) -> list[Step]:
    """Splits whole rollouts into at most `steps` steps of about equal numbers of rollouts; groups are shuffled.

    `rows` were made of `calls`. Raises TrainingError for a rule that cannot be used.
    """
    by_rollout: dict[str, list[TokenSequence]] = {}
    for row in rows:
        by_rollout.setdefault(row.rollout, []).append(row)
    groups: dict[str, list[str]] = {}
    for rollout, own in by_rollout.items():
        groups.setdefault(own[0].group, []).append(rollout)
    names = list(groups)
    ordered = [rollout for index in rng.permutation(len(names)) for rollout in groups[names[index]]]
    parts = np.array_split(np.arange(len(ordered)), min(steps, len(ordered))) if ordered else []
    known = {call.number: call for call in calls}
    return [_step([by_rollout[ordered[index]] for index in part], known, rule, layout) for part in parts]


def _step(
    rollouts: Sequence[Sequence[TokenSequence]], calls: Mapping[int, Call], rule: Rule, layout: BatchLayout
) -> Step:
    rows = [row for own in rollouts for row in own]
    weight_of = _weights(rows, calls, rule)
    cuts = layout.cut(rows)
    return Step(
        cuts=tuple(cuts),
        weights={row.number: {part.call: weight_of[part.call] for part in row.sampled} for row in rows},
        dummies=0,
        micro_batches=(),
        rollouts=len(rollouts),
        rows=len(rows),
        trained=sum(row.n_trained for row in rows),
        forwarded=sum(cut.tokens for cut in cuts),
        padded=sum(cut.size for cut in cuts),
        unique=unique_tokens(rows),
    )


def _weights(rows: Sequence[TokenSequence], calls: Mapping[int, Call], rule: Rule) -> dict[int, float]:
    """Weight of each call of a step, by its place in the dataset."""
    numbers = [part.call for row in rows for part in row.sampled]
    known = [
        StepCall(call.rollout, call.group, call.index, len(call.completion_ids), call.advantage, call.policy_version)
        for call in (calls[number] for number in numbers)
    ]
    return dict(zip(numbers, apply(rule, known), strict=True))

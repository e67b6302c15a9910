"""Rows → optimizer steps → micro-batches.

A rollout's rows are never split between steps, so that per-rollout weights are exact. Rollouts of a group are kept
together if the number of steps allows, since they share their first tokens. A plan holds no tokens: one process plans
for all rows, and each process builds micro-batches from its own rows.
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
    """Rows forwarded together; in a share, those of one process."""
    weights: Mapping[int, Mapping[int, float]]
    """Row number → index of each of its calls in the dataset → the call's weight in the objective."""
    observation_weights: Mapping[int, float]
    """Row number → weight of each of its observation tokens in their mean; empty if they are not wanted."""
    dummies: int
    """Number of empty micro-batches added to them."""
    micro_batches: tuple[MicroBatch, ...]
    """Empty before `build`."""
    rollouts: int
    """Across all processes, like the figures below."""
    rows: int
    trained: int
    """Number of tokens in the loss."""
    forwarded: int
    """Number of tokens that go through the model, without padding."""
    padded: int
    """Number of tokens that go through the model, with padding."""
    unique: int
    """Number of tokens in the prefix tree of all rows: the minimum to forward."""
    unobserved: int = 0
    """Number of tokens between calls that are not trained as observations, if these are wanted."""

    def share(self, rank: int, size: int) -> "Step":
        """The share of one of `size` processes; all get the same number of micro-batches."""
        mine = self.cuts[rank::size]
        weights = {row: self.weights[row] for cut in mine for row in cut.rows}
        return replace(self, cuts=mine, weights=weights, dummies=-(-len(self.cuts) // size) - len(mine))

    def build(self, rows: Iterable[TokenSequence]) -> "Step":
        """The step with its micro-batches; `rows` include at least those that it forwards."""
        weighted = [
            WeightedRow(
                row,
                row.weighed(self.weights[row.number]) * self.trained,
                self.observation_weights.get(row.number, 0.0),
            )
            for row in rows
            if row.number in self.weights
        ]
        batches = make_batches(self.cuts, weighted, self.trained)
        return replace(self, micro_batches=(*batches, *[dummy(self.trained)] * self.dummies))


def plan_steps(
    rows: Sequence[TokenSequence],
    calls: Sequence[Call],
    *,
    steps: int,
    rule: Rule,
    layout: BatchLayout,
    rng: np.random.Generator,
) -> list[Step]:
    """Splits whole rollouts into at most `steps` steps with about equal numbers of rollouts; groups are shuffled.

    `rows` were made from `calls`. Raises TrainingError if the rule returns invalid weights.
    """
    by_rollout: dict[str, list[TokenSequence]] = {}
    for row in rows:
        by_rollout.setdefault(row.rollout, []).append(row)
    groups: dict[str, list[str]] = {}
    for rollout, rollout_rows in by_rollout.items():
        groups.setdefault(rollout_rows[0].group, []).append(rollout)
    names = list(groups)
    ordered = [rollout for index in rng.permutation(len(names)) for rollout in groups[names[index]]]
    parts = np.array_split(np.arange(len(ordered)), min(steps, len(ordered))) if ordered else []
    known = {call.number: call for call in calls}
    return [_step([by_rollout[ordered[index]] for index in part], known, rule, layout) for part in parts]


def _step(
    rollouts: Sequence[Sequence[TokenSequence]], calls: Mapping[int, Call], rule: Rule, layout: BatchLayout
) -> Step:
    rows = [row for rollout_rows in rollouts for row in rollout_rows]
    weight_of = _weights(rows, calls, rule)
    cuts = layout.micro_batches(rows)
    return Step(
        cuts=tuple(cuts),
        weights={row.number: {part.call: weight_of[part.call] for part in row.sampled} for row in rows},
        observation_weights=_observation_weights(rollouts),
        dummies=0,
        micro_batches=(),
        rollouts=len(rollouts),
        rows=len(rows),
        trained=sum(row.n_trained for row in rows),
        forwarded=sum(cut.tokens for cut in cuts),
        padded=sum(cut.size for cut in cuts),
        unique=unique_tokens(rows),
        unobserved=sum(row.unobserved for row in rows),
    )


def _observation_weights(rollouts: Sequence[Sequence[TokenSequence]]) -> dict[int, float]:
    """1/(R·M_r): the mean over the R rollouts of the mean over their M_r observation tokens (arXiv 2605.24517)."""
    tokens = {rows[0].rollout: sum(len(row.observed) for row in rows) for rows in rollouts}
    observing = (row for rows in rollouts for row in rows if len(row.observed))
    return {row.number: 1 / (len(rollouts) * tokens[row.rollout]) for row in observing}


def _weights(rows: Sequence[TokenSequence], calls: Mapping[int, Call], rule: Rule) -> dict[int, float]:
    """Weight of each call of a step, by its index in the dataset."""
    numbers = [part.call for row in rows for part in row.sampled]
    known = [
        StepCall(call.rollout, call.group, call.index, len(call.completion_ids), call.advantage, call.policy_version)
        for call in (calls[number] for number in numbers)
    ]
    return dict(zip(numbers, apply(rule, known), strict=True))

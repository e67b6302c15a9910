"""Rows → passes over the data → optimizer steps → micro-batches. All of it follows from rows, settings and seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainspan_schemas.config.settings import SftSettings
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.micro_batches import MicroBatch, WeightedRow, make_batches
from trainspan_training.data.sequences import TokenSequence

__all__ = ["SftPlan", "plan_of"]

_STEPS, _LEAST, _MOST = 32, 256, 16384
"""Steps of an epoch, and limits of the tokens in a step, if `batch_tokens` is not set."""


@dataclass(frozen=True, slots=True)
class SftPlan:
    """The optimizer steps of a job."""

    rows: tuple[TokenSequence, ...]
    held_out: tuple[TokenSequence, ...]
    layout: BatchLayout
    batch_tokens: int
    """Tokens in the loss of a step, about."""
    steps_per_epoch: int
    steps: int
    """Of the whole job."""
    seed: int

    def epoch_of(self, step: int) -> float:
        """Passes over the data after this number of steps."""
        return step / self.steps_per_epoch

    def after(self, done: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step after the first `done`."""
        epoch, parts = -1, list[list[TokenSequence]]()
        for number in range(done, self.steps):
            current, index = divmod(number, self.steps_per_epoch)
            if current != epoch:
                epoch, parts = current, self._parts(current)
            yield self.batches(parts[index])

    def batches(self, rows: Sequence[TokenSequence]) -> list[MicroBatch]:
        """Micro-batches of rows that count together."""
        weighted = [WeightedRow(row, np.ones(row.n_trained)) for row in rows]
        return make_batches(self.layout.cut(rows), weighted, sum(row.n_trained for row in rows))

    def _parts(self, epoch: int) -> list[list[TokenSequence]]:
        """The rows of each step of an epoch: in random order, groups together, about equally many trained tokens."""
        groups: dict[str, list[TokenSequence]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        names = list(groups)
        order = np.random.default_rng([self.seed, 1, epoch]).permutation(len(names))
        rows = [row for index in order for row in groups[names[index]]]
        ends = np.cumsum([row.n_trained for row in rows])
        count, start, parts = self.steps_per_epoch, 0, []
        for part in range(1, count + 1):
            stop = int(np.searchsorted(ends, ends[-1] * part / count)) + 1
            stop = min(max(stop, start + 1), len(rows) - (count - part))
            parts.append(rows[start:stop])
            start = stop
        return parts


def plan_of(
    rows: Sequence[TokenSequence], held_out: Sequence[TokenSequence], layout: BatchLayout, settings: SftSettings
) -> SftPlan:
    """The plan for the rows, of which there is at least one."""
    trained = sum(row.n_trained for row in rows)
    tokens = settings.batch_tokens or min(_MOST, max(_LEAST, trained // _STEPS))
    per_epoch = max(1, min(len(rows), round(trained / tokens)))
    steps = settings.max_steps or max(1, round(settings.epochs * per_epoch))
    return SftPlan(tuple(rows), tuple(held_out), layout, tokens, per_epoch, steps, settings.seed)

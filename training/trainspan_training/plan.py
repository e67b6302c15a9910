"""Rows → optimizer steps → micro-batches.

A rollout's rows never part: they stand in one step, so that weights per rollout are exact. Within a step rows are put
together by length, up to a number of padded tokens; how they are put together changes neither loss nor gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .rows import Row

__all__ = ["MicroBatch", "Step", "plan_steps"]

_PASSES_PER_BUDGET = 64
"""The fixed cost of a forward and backward pass is about that of 1/64 of the budget's tokens (measured: 1/60 to 1/80)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows padded on the right to T tokens, N of them trained (flat arrays are in row-major order)."""

    tokens: NDArray[np.int64]
    """(B, T), 0 where padded."""
    lengths: NDArray[np.int64]
    """(B,) tokens of each row."""
    trained: NDArray[np.bool_]
    """(B, T)"""
    logprobs: NDArray[np.float64]
    """(N,) under the policy that sampled."""
    advantages: NDArray[np.float64]
    """(N,) times the row's weight in the objective."""
    temperatures: NDArray[np.float64]
    """(N,)"""
    n_step: int
    """Trained tokens of the whole step."""

    def first(self, tokens: int) -> "MicroBatch":
        """Its first rows, as many as `tokens` padded tokens hold, and at least one."""
        rows = max(1, tokens // self.tokens.shape[1])
        trained = int(self.trained[:rows].sum())
        return replace(
            self,
            tokens=self.tokens[:rows],
            lengths=self.lengths[:rows],
            trained=self.trained[:rows],
            logprobs=self.logprobs[:trained],
            advantages=self.advantages[:trained],
            temperatures=self.temperatures[:trained],
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    rollouts: int
    rows: int
    trained: int
    """Tokens in the loss."""
    forwarded: int
    """Tokens of all rows, without padding."""
    padded: int
    """Tokens that go through the model, with padding."""


def plan_steps(
    rows: Sequence[Row], *, steps: int, weights: str, micro_batch_tokens: int, rng: np.random.Generator
) -> list[Step]:
    """Splits whole rollouts, shuffled, into at most `steps` steps of about equal numbers of rollouts.

    `weights`: the objective's weight of a token of rollout r, with N_r trained tokens, in a step of R rollouts and N
    trained tokens, times 1/N in the loss: "rollout" N/(R·N_r), the mean over rollouts of the mean over their tokens;
    "token" 1, the mean over tokens.
    """
    by_rollout: dict[str, list[Row]] = {}
    for row in rows:
        by_rollout.setdefault(row.rollout, []).append(row)
    rollouts = list(by_rollout)
    order = rng.permutation(len(rollouts))
    parts = np.array_split(order, min(steps, len(rollouts))) if rollouts else []
    return [_step([by_rollout[rollouts[index]] for index in part], weights, micro_batch_tokens) for part in parts]


def _step(rollouts: list[list[Row]], weights: str, micro_batch_tokens: int) -> Step:
    trained_R = [sum(row.n_trained for row in rows) for rows in rollouts]
    trained = sum(trained_R)
    weighted: list[tuple[Row, float]] = []
    for rows, n_rollout in zip(rollouts, trained_R, strict=True):
        weight = trained / (len(rollouts) * n_rollout) if weights == "rollout" else 1.0
        weighted += [(row, weight) for row in rows]
    weighted.sort(key=lambda item: len(item[0].tokens), reverse=True)
    batches = _cut(weighted, micro_batch_tokens)
    return Step(
        micro_batches=tuple(_pad(batch, trained) for batch in batches),
        rollouts=len(rollouts),
        rows=len(weighted),
        trained=trained,
        forwarded=sum(len(row.tokens) for row, _ in weighted),
        padded=sum(len(batch) * len(batch[0][0].tokens) for batch in batches),
    )


def _cut(weighted: list[tuple[Row, float]], budget: int) -> list[list[tuple[Row, float]]]:
    """Longest first; a new micro-batch where the budget is full, or padding would cost more than a further forward pass.

    A row that alone exceeds the budget is a micro-batch of its own.
    """
    batches: list[list[tuple[Row, float]]] = []
    longest = padding = 0
    for item in weighted:
        length = len(item[0].tokens)
        padding += longest - length
        if batches and (len(batches[-1]) + 1) * longest <= budget and padding <= budget // _PASSES_PER_BUDGET:
            batches[-1].append(item)
        else:
            batches.append([item])
            longest, padding = length, 0
    return batches


def _pad(batch: list[tuple[Row, float]], n_step: int) -> MicroBatch:
    rows = [row for row, _ in batch]
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    trained = np.zeros(tokens.shape, dtype=np.bool_)
    for index, row in enumerate(rows):
        tokens[index, : lengths[index]] = row.tokens
        trained[index, : lengths[index]] = row.trained
    return MicroBatch(
        tokens=tokens,
        lengths=lengths,
        trained=trained,
        logprobs=np.concatenate([row.logprobs[row.trained] for row in rows]),
        advantages=np.concatenate([row.advantages[row.trained] * weight for row, weight in batch]),
        temperatures=np.concatenate([row.temperatures[row.trained] for row in rows]),
        n_step=n_step,
    )

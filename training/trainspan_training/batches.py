"""Micro-batches: what one forward pass gets, and what the loss needs of each trained token.

How rows are put together changes neither loss nor gradient: see `padded` here and `tree.shared`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .rows import Row

__all__ = ["PASSES_PER_BUDGET", "Branches", "Limits", "MicroBatch", "WeightedRow", "dummy", "gathered", "padded"]

PASSES_PER_BUDGET = 64
"""The fixed cost of a forward and backward pass is about that of 1/64 of the budget's tokens (measured: 1/60 to 1/80)."""


@dataclass(frozen=True, slots=True)
class Branches:
    """How a sequence of T tokens in depth-first order branches: q sees kv iff kv ≤ q < ends[kv]."""

    depths: NDArray[np.int64]
    """(T,) place of the token in its own row."""
    ends: NDArray[np.int64]
    """(T,) where the subtree of the token ends."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences padded on the right to T tokens, and the N trained tokens whose scores are asked for.

    A trained token that rollouts share in a prefix tree stands among the N once for each.
    """

    tokens: NDArray[np.int64]
    """(B, T), 0 where padded."""
    branches: Branches | None
    """Of a prefix tree (then B is 1); None: each sequence is a row, and attention is causal."""
    predicting: NDArray[np.int64]
    """(N,) flat position in `tokens` of the token before, whose output predicts this one."""
    targets: NDArray[np.int64]
    """(N,) token ids."""
    calls: NDArray[np.int64]
    """(N,) index, in the dataset, of the call that sampled it."""
    sampled: NDArray[np.float64]
    """(N,) log-probability under the policy that sampled."""
    old: NDArray[np.float64]
    """(N,) log-probability that the importance ratio is taken against."""
    reference: NDArray[np.float64] | None
    """(N,) log-probability under the model that the run started from, where the loss needs it."""
    advantages: NDArray[np.float64]
    """(N,) times `weights`, and times the off-policy correction."""
    weights: NDArray[np.float64]
    """(N,) weight in the objective, times the step's trained tokens."""
    temperatures: NDArray[np.float64]
    """(N,)"""
    n_tokens: int
    """Tokens in `tokens`, without padding."""
    n_step: int
    """Trained tokens of the whole step."""

    def first(self, tokens: int) -> "MicroBatch":
        """Its first rows, as many as `tokens` padded tokens hold, and at least one; a tree stays whole."""
        rows, width = max(1, tokens // self.tokens.shape[1]), self.tokens.shape[1]
        if self.branches is not None or rows >= len(self.tokens):
            return self
        kept = self.predicting < rows * width
        names = ("predicting", "targets", "calls", "sampled", "old", "advantages", "weights", "temperatures")
        columns = {name: getattr(self, name)[kept] for name in names}
        reference = None if self.reference is None else self.reference[kept]
        return replace(self, **columns, tokens=self.tokens[:rows], reference=reference)


@dataclass(frozen=True, slots=True)
class WeightedRow:
    """A row and the weights (N,) of its trained tokens, times the step's trained tokens."""

    row: Row
    weights: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits into one forward pass."""

    tokens: int
    """Padding included."""
    trained: int = 2**62
    """Trained tokens, each of which takes the memory of a whole vocabulary."""


def padded(rows: Sequence[WeightedRow], limits: Limits, n_step: int) -> list[MicroBatch]:
    """Rows of about equal length together, padded on the right.

    Longest first; a new micro-batch where a limit is reached, or padding would cost more than a further forward pass.
    A row that alone exceeds a limit is a micro-batch of its own.
    """
    batches: list[list[WeightedRow]] = []
    longest = padding = trained = 0
    for item in sorted(rows, key=lambda item: len(item.row.tokens), reverse=True):
        length = len(item.row.tokens)
        padding += longest - length
        trained += item.row.n_trained
        if (
            batches
            and (len(batches[-1]) + 1) * longest <= limits.tokens
            and trained <= limits.trained
            and padding <= limits.tokens // PASSES_PER_BUDGET
        ):
            batches[-1].append(item)
        else:
            batches.append([item])
            longest, padding, trained = length, 0, item.row.n_trained
    return [_pad(batch, n_step) for batch in batches]


def _pad(batch: Sequence[WeightedRow], n_step: int) -> MicroBatch:
    width = max(len(item.row.tokens) for item in batch)
    tokens = np.zeros((len(batch), width), dtype=np.int64)
    for index, item in enumerate(batch):
        tokens[index, : len(item.row.tokens)] = item.row.tokens
    predicting = np.concatenate([index * width + item.row.positions - 1 for index, item in enumerate(batch)])
    n_tokens = sum(len(item.row.tokens) for item in batch)
    return gathered(batch, tokens, None, predicting, n_tokens=n_tokens, n_step=n_step)


def gathered(
    batch: Sequence[WeightedRow],
    tokens: NDArray[np.int64],
    branches: Branches | None,
    predicting: NDArray[np.int64],
    *,
    n_tokens: int,
    n_step: int,
) -> MicroBatch:
    """The micro-batch of these rows, whose tokens stand in `tokens` and are predicted at `predicting`."""
    rows = [item.row for item in batch]
    weights = np.concatenate([item.weights for item in batch])
    sampled = np.concatenate([row.logprobs for row in rows])
    return MicroBatch(
        tokens=tokens,
        branches=branches,
        predicting=predicting,
        targets=np.concatenate([row.tokens[row.positions] for row in rows]).astype(np.int64),
        calls=np.concatenate([row.calls for row in rows]),
        sampled=sampled,
        old=sampled,
        reference=None,
        advantages=np.concatenate([row.advantages for row in rows]) * weights,
        weights=weights,
        temperatures=np.concatenate([row.temperatures for row in rows]),
        n_tokens=n_tokens,
        n_step=n_step,
    )


def dummy(n_step: int) -> MicroBatch:
    """One token and nothing trained: what a process forwards that has no rows left while others have."""
    none, no_index = np.zeros(0), np.zeros(0, dtype=np.int64)
    return MicroBatch(
        tokens=np.zeros((1, 1), dtype=np.int64),
        branches=None,
        predicting=no_index,
        targets=no_index,
        calls=no_index,
        sampled=none,
        old=none,
        reference=None,
        advantages=none,
        weights=none,
        temperatures=none,
        n_tokens=0,
        n_step=n_step,
    )

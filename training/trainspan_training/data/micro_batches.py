"""Micro-batches: the input of one forward pass, and the per-token data that the loss needs.

Rows are assigned to micro-batches beforehand, without arrays: see `cuts`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainspan_training.data.cuts import BLOCK, Cut, Tree
from trainspan_training.data.sequences import TokenSequence, overlaps
from trainspan_training.data.token_limits import TokenLimits

__all__ = ["Branches", "MicroBatch", "Observations", "WeightedRow", "dummy", "make_batches"]


@dataclass(frozen=True, slots=True)
class Branches:
    """Branching of a sequence of T tokens, a series of trees in depth-first order: q sees kv iff kv ≤ q < ends[kv].

    A single row is a tree that does not branch.
    """

    depths: NDArray[np.int64]
    """(T,) position of the token in its own row."""
    ends: NDArray[np.int64]
    """(T,) end of the token's subtree."""

    def pieces(self) -> list[tuple[int, int]]:
        """(start, end) of each tree."""
        pieces, start = [], 0
        while start < len(self.ends):
            stop = int(self.ends[start])
            pieces.append((start, stop))
            start = stop
        return pieces

    def first(self, tokens: int) -> "Branches":
        """The first trees that fit in `tokens`, at least one; padded to whole blocks if it is now."""
        stops = [stop for _, stop in self.pieces()]
        end = max([stop for stop in stops if stop <= tokens], default=stops[0])
        size = -(-end // BLOCK) * BLOCK if len(self.ends) % BLOCK == 0 else end
        ends = np.concatenate([self.ends[:end], np.arange(end, size) + 1])
        return Branches(np.concatenate([self.depths[:end], np.zeros(size - end, dtype=np.int64)]), ends)


@dataclass(frozen=True, slots=True)
class Observations:
    """The M observation tokens of a micro-batch; one that rows share in a prefix tree is scored once."""

    predicting: NDArray[np.int64]
    """(M,) flat position in the micro-batch's tokens of the preceding token."""
    targets: NDArray[np.int64]
    """(M,) token ids."""
    weights: NDArray[np.float64]
    """(M,) weight in the mean over the step: 1/(R·M_r) for R rollouts, of which one has M_r such tokens; summed over its rows."""
    counts: NDArray[np.int64]
    """(M,) number of its rows."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences padded on the right to T tokens, and the N trained tokens to score.

    A trained token that several rollouts share in a prefix tree counts once per rollout in N.
    """

    tokens: NDArray[np.int64]
    """(B, T), 0 where padded."""
    branches: Branches | None
    """Branching of a prefix tree (then B is 1); if None, each sequence is a row, and attention is causal."""
    predicting: NDArray[np.int64]
    """(N,) flat position in `tokens` of the preceding token, whose output predicts this one."""
    targets: NDArray[np.int64]
    """(N,) token ids."""
    calls: NDArray[np.int64]
    """(N,) index in the dataset of the call that sampled the token."""
    sampled: NDArray[np.float64]
    """(N,) log-probability under the sampling policy."""
    old: NDArray[np.float64]
    """(N,) log-probability in the denominator of the importance ratio."""
    reference: NDArray[np.float64] | None
    """(N,) log-probability under the model that the run started from, if the loss needs it."""
    advantages: NDArray[np.float64]
    """(N,) times `weights`, and times the off-policy correction."""
    weights: NDArray[np.float64]
    """(N,) weight in the objective, times the number of trained tokens in the step."""
    temperatures: NDArray[np.float64]
    """(N,)"""
    n_tokens: int
    """Number of tokens in `tokens`, without padding."""
    n_step: int
    """Number of trained tokens in the whole step."""
    limits: TokenLimits | None = None
    """Limits on the N trained tokens; None if they were unconstrained."""
    observations: Observations | None = None
    """None if there are none, or they are not wanted."""

    def first(self, tokens: int) -> "MicroBatch":
        """The first rows or trees that fit in `tokens` padded tokens, at least one; without observations."""
        if self.tokens.size <= tokens:
            return replace(self, observations=None)
        if self.branches is None:
            branches, width = None, self.tokens.shape[1]
            some = self.tokens[: max(1, tokens // width)]
            end = some.size
        else:
            branches = self.branches.first(tokens)
            some = self.tokens[:, : len(branches.ends)].copy()
            end = max(stop for _, stop in self.branches.pieces() if stop <= some.size)
            some[:, end:] = 0  # the rest of the last block is padding, not the start of the next tree
        is_inside = self.predicting < end
        names = ("predicting", "targets", "calls", "sampled", "old", "advantages", "weights", "temperatures")
        columns: dict[str, Any] = {name: getattr(self, name)[is_inside] for name in names}
        reference = None if self.reference is None else self.reference[is_inside]
        limits = None if self.limits is None else self.limits.select(is_inside)
        columns |= {"reference": reference, "limits": limits, "observations": None}
        return replace(self, **columns, tokens=some, branches=branches)


@dataclass(frozen=True, slots=True)
class WeightedRow:
    """A row and the weights (N,) of its trained tokens, times the number of trained tokens in the step."""

    row: TokenSequence
    weights: NDArray[np.float64]
    observation_weight: float = 0.0
    """Weight of each of its observation tokens in the mean over the step."""


def make_batches(cuts: Iterable[Cut], rows: Iterable[WeightedRow], n_step: int) -> list[MicroBatch]:
    """Builds the planned micro-batches from the rows that they name."""
    by_number = {item.row.number: item for item in rows}
    return [(_flatten if cut.flat else _pad)(cut, by_number, n_step) for cut in cuts]


def _pad(cut: Cut, rows: Mapping[int, WeightedRow], n_step: int) -> MicroBatch:
    batch = [rows[number] for number in cut.rows]
    width = max(len(item.row.tokens) for item in batch)
    tokens = np.zeros((len(batch), width), dtype=np.int64)
    for index, item in enumerate(batch):
        tokens[index, : len(item.row.tokens)] = item.row.tokens
    paths = [np.arange(index * width, (index + 1) * width) for index in range(len(batch))]
    return _gather(batch, tokens, None, paths, n_tokens=cut.tokens, n_step=n_step)


def _flatten(cut: Cut, rows: Mapping[int, WeightedRow], n_step: int) -> MicroBatch:
    """Lays out trees in depth-first order; nothing attends to the padding after them, up to whole blocks."""
    total = cut.size
    tokens, depths = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    ends = np.arange(1, total + 1)
    path = np.zeros(0, dtype=np.int64)  # positions of the previous row's tokens
    paths = []
    start = 0
    for row, overlap in chain.from_iterable(_rows_of(tree, rows) for tree in cut.trees):
        ends[path[overlap:]] = start
        stop = start + len(row.tokens) - overlap
        tokens[start:stop] = row.tokens[overlap:]
        depths[start:stop] = np.arange(overlap, len(row.tokens))
        path = np.concatenate([path[:overlap], np.arange(start, stop)])
        paths.append(path)
        start = stop
    ends[path] = start
    batch = [rows[number] for number in cut.rows]
    branches = Branches(depths, ends)
    return _gather(batch, tokens[None], branches, paths, n_tokens=cut.tokens, n_step=n_step)


def _rows_of(tree: Tree, rows: Mapping[int, WeightedRow]) -> list[tuple[TokenSequence, int]]:
    """The tree's rows, each with the number of tokens shared with the previous row (0 for the first)."""
    tree_rows = [rows[number].row for number in tree.rows]
    return list(zip(tree_rows, overlaps(tree_rows), strict=True))


def _gather(
    batch: Sequence[WeightedRow],
    tokens: NDArray[np.int64],
    branches: Branches | None,
    paths: Sequence[NDArray[np.int64]],
    *,
    n_tokens: int,
    n_step: int,
) -> MicroBatch:
    """The micro-batch of these rows: the flat positions of each row's tokens in `tokens` begin its path in `paths`."""
    rows = [item.row for item in batch]
    weights = np.concatenate([item.weights for item in batch])
    sampled = np.concatenate([row.logprobs for row in rows])
    return MicroBatch(
        tokens=tokens,
        branches=branches,
        predicting=np.concatenate([path[row.positions - 1] for path, row in zip(paths, rows, strict=True)]),
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
        limits=TokenLimits.joined([(row.limits, row.n_trained) for row in rows]),
        observations=_observations(batch, paths),
    )


def _observations(batch: Sequence[WeightedRow], paths: Sequence[NDArray[np.int64]]) -> Observations | None:
    sizes = [len(item.row.observed) for item in batch]
    if not sum(sizes):
        return None
    pairs = list(zip(paths, (item.row for item in batch), strict=True))
    predicting = np.concatenate([path[row.observed - 1] for path, row in pairs])
    targets = np.concatenate([row.tokens[row.observed] for _, row in pairs])
    weights = np.repeat([item.observation_weight for item in batch], sizes)
    # A token's own place: siblings are predicted at the same one.
    places = np.concatenate([path[row.observed] for path, row in pairs])
    _, first, index, counts = np.unique(places, return_index=True, return_inverse=True, return_counts=True)
    summed = np.zeros(len(first))
    np.add.at(summed, index, weights)
    return Observations(predicting[first], targets[first].astype(np.int64), summed, counts)


def dummy(n_step: int) -> MicroBatch:
    """One token, none trained: forwarded by a process that has run out of rows before the others."""
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

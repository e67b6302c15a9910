"""The prefix tree: tokens that several rows share, from their first token on, are forwarded once.

Rows in lexicographic order are the leaves of their prefix tree in depth-first order: each row adds the tokens that it
does not share with the row before. A token is seen by those that follow it within its subtree, which is one interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .batches import Branches, Limits, MicroBatch, WeightedRow, gathered
from .rows import Row

__all__ = ["TreeCost", "shared", "unique_tokens"]

_BLOCK = 128
"""Edge of the blocks that compiled flex attention computes."""


@dataclass(frozen=True, slots=True)
class TreeCost:
    """When a further row is worth a larger tree. All in units of a token's cost in the layers, attention left out."""

    pair: float
    """Cost of one more pair of tokens in a mask; 0 where attention computes only what a token sees."""
    a_pass: float
    """Fixed cost of a forward and backward pass."""
    blocks: bool = False
    """Whether attention goes by whole blocks, to which sequences are then padded."""

    def joins(self, size: int, new: int, length: int) -> bool:
        """Whether a row of `length` tokens, `new` of them unshared, costs less in a tree of `size` tokens than alone."""
        together = new + self.pair * ((size + new) ** 2 - size**2)
        return together <= length + self.pair * length**2 + self.a_pass


def unique_tokens(rows: Sequence[Row]) -> int:
    """Tokens of the rows' prefix tree."""
    ordered = sorted(rows, key=_key)
    return sum(len(row.tokens) - overlap for row, overlap in zip(ordered, _overlaps(ordered), strict=True))


def shared(rows: Sequence[WeightedRow], limits: Limits, n_step: int, cost: TreeCost) -> list[MicroBatch]:
    """Prefix trees of the rows, one micro-batch each, of at most the limits (a row that alone exceeds one is alone)."""
    ordered = sorted(rows, key=lambda item: _key(item.row))
    overlaps = _overlaps([item.row for item in ordered])
    trees: list[list[WeightedRow]] = []
    size = trained = 0
    for item, overlap in zip(ordered, overlaps, strict=True):
        length = len(item.row.tokens)
        new = length - overlap
        trained += item.row.n_trained
        fits = size + new <= limits.tokens and trained <= limits.trained
        if trees and fits and cost.joins(size, new, length):
            trees[-1].append(item)
            size += new
        else:
            trees.append([item])
            size, trained = length, item.row.n_trained
    return [_flatten(tree, n_step, pad=cost.blocks) for tree in trees]


def _key(row: Row) -> bytes:
    """Sorts token sequences lexicographically."""
    return row.tokens.astype(">i4").tobytes()


def _overlaps(rows: Sequence[Row]) -> list[int]:
    """Tokens that each row shares with the one before."""
    return [0, *(_overlap(a.tokens, b.tokens) for a, b in pairwise(rows))][: len(rows)]


def _overlap(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _flatten(tree: Sequence[WeightedRow], n_step: int, *, pad: bool) -> MicroBatch:
    """Depth-first order; `pad` rounds its length up to whole blocks with tokens that nobody sees."""
    rows = [item.row for item in tree]
    overlaps = _overlaps(rows)
    size = sum(len(row.tokens) - overlap for row, overlap in zip(rows, overlaps, strict=True))
    total = -(-size // _BLOCK) * _BLOCK if pad else size
    tokens, depths = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    ends = np.arange(1, total + 1)
    path = np.zeros(0, dtype=np.int64)  # where the tokens of the row before stand
    predicting = []
    start = 0
    for row, overlap in zip(rows, overlaps, strict=True):
        ends[path[overlap:]] = start
        stop = start + len(row.tokens) - overlap
        tokens[start:stop] = row.tokens[overlap:]
        depths[start:stop] = np.arange(overlap, len(row.tokens))
        path = np.concatenate([path[:overlap], np.arange(start, stop)])
        predicting.append(path[row.positions - 1])
        start = stop
    ends[path] = start
    branches = Branches(depths, ends)
    return gathered(tree, tokens[None], branches, np.concatenate(predicting), n_tokens=size, n_step=n_step)

"""The prefix tree: tokens that several rows share, from their first token on, are forwarded once.

Rows in lexicographic order are the leaves of their prefix tree in depth-first order: each row adds the tokens that it
does not share with the row before. A token is seen by those that follow it within its subtree, which is one interval.
Trees, and rows by themselves, follow one another in one sequence as far as it holds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .batches import BLOCK, Branches, MicroBatch, WeightedRow, gathered
from .bins import fill
from .rows import Row

__all__ = ["TreeCost", "packed", "shared", "unique_tokens"]


@dataclass(frozen=True, slots=True)
class TreeCost:
    """When a further row is worth a larger tree. All in units of a token's cost in the layers, attention left out."""

    pair: float
    """Cost of one more pair of tokens in a mask; 0 where attention computes only what a token sees."""

    def joins(self, size: int, new: int, length: int) -> bool:
        """Whether a row of `length` tokens, `new` of them unshared, costs less in a tree of `size` tokens than alone."""
        together = new + self.pair * ((size + new) ** 2 - size**2)
        return new < length and together <= length + self.pair * length**2


def unique_tokens(rows: Sequence[Row]) -> int:
    """Tokens of the rows' prefix tree."""
    ordered = sorted(rows, key=_key)
    return sum(len(row.tokens) - overlap for row, overlap in zip(ordered, _overlaps(ordered), strict=True))


def packed(
    rows: Sequence[WeightedRow], tokens: int, n_step: int, *, processes: int = 1, blocks: bool = False
) -> list[MicroBatch]:
    """Rows one after another in sequences of at most so many tokens (a row that alone exceeds them is alone)."""
    return _fill([[item] for item in rows], tokens, n_step, processes, blocks)


def shared(
    rows: Sequence[WeightedRow],
    tokens: int,
    n_step: int,
    cost: TreeCost,
    *,
    edge: int | None = None,
    processes: int = 1,
    blocks: bool = False,
) -> list[MicroBatch]:
    """Prefix trees of the rows, one after another in sequences of at most so many tokens; a tree has at most `edge`.

    `blocks`: attention goes by whole blocks, to which sequences are then padded. A row that alone exceeds the limit is
    alone.
    """
    ordered = sorted(rows, key=lambda item: _key(item.row))
    overlaps = _overlaps([item.row for item in ordered])
    greatest = tokens if edge is None else min(edge, tokens)
    trees: list[list[WeightedRow]] = []
    size = 0
    for item, overlap in zip(ordered, overlaps, strict=True):
        length = len(item.row.tokens)
        new = length - overlap
        if trees and size + new <= greatest and cost.joins(size, new, length):
            trees[-1].append(item)
            size += new
        else:
            trees.append([item])
            size = length
    return _fill(trees, tokens, n_step, processes, blocks)


def _fill(
    trees: Sequence[list[WeightedRow]], tokens: int, n_step: int, processes: int, blocks: bool
) -> list[MicroBatch]:
    sizes = [unique_tokens([item.row for item in tree]) for tree in trees]
    bins = fill(sizes, tokens, processes)
    return [_flatten([trees[index] for index in chosen], n_step, pad=blocks) for chosen in bins]


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


def _flatten(trees: Sequence[Sequence[WeightedRow]], n_step: int, *, pad: bool) -> MicroBatch:
    """Depth-first order; `pad` rounds its length up to whole blocks with tokens that nobody sees."""
    rows = [(item.row, overlap) for tree in trees for item, overlap in zip(tree, _of(tree), strict=True)]
    size = sum(len(row.tokens) - overlap for row, overlap in rows)
    total = -(-size // BLOCK) * BLOCK if pad else size
    tokens, depths = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    ends = np.arange(1, total + 1)
    path = np.zeros(0, dtype=np.int64)  # where the tokens of the row before stand
    predicting = []
    start = 0
    for row, overlap in rows:
        ends[path[overlap:]] = start
        stop = start + len(row.tokens) - overlap
        tokens[start:stop] = row.tokens[overlap:]
        depths[start:stop] = np.arange(overlap, len(row.tokens))
        path = np.concatenate([path[:overlap], np.arange(start, stop)])
        predicting.append(path[row.positions - 1])
        start = stop
    ends[path] = start
    branches = Branches(depths, ends)
    items = [item for tree in trees for item in tree]
    return gathered(items, tokens[None], branches, np.concatenate(predicting), n_tokens=size, n_step=n_step)


def _of(tree: Sequence[WeightedRow]) -> list[int]:
    """Tokens that each row of a tree shares with the one before; the first begins the tree."""
    return _overlaps([item.row for item in tree])

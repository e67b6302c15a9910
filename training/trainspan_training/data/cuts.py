"""Which rows make a micro-batch: planned by the lengths of rows and by what they share, before any array is made.

Rows in lexicographic order are the leaves of their prefix tree in depth-first order: each row adds the tokens that it
does not share with the row before. Trees, and rows by themselves, follow one another in one sequence as far as it holds
them; padded rows stand side by side. How rows are put together changes neither loss nor gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainspan_training.data.bins import fill
from trainspan_training.data.sequences import TokenSequence, lexicographic, overlaps

__all__ = ["BLOCK", "PASS", "Cut", "Tree", "TreeCost", "packed", "padded", "shared", "unique_tokens"]

PASS = 256
"""The fixed cost of a forward and backward pass is about that of so many tokens (measured: 205 to 273)."""
BLOCK = 128
"""Edge of the blocks that compiled flex attention computes."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows that share tokens from their first one on; one row by itself is a tree that does not branch."""

    rows: tuple[int, ...]
    """By number, in lexicographic order."""
    size: int
    """Tokens, shared ones once."""
    depths: int
    """Sum over its tokens of their places in their own rows."""
    chain: bool
    """Whether each token sees all before it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What one forward pass gets."""

    trees: tuple[Tree, ...]
    flat: bool
    """Trees one after another in one sequence; else rows side by side, padded on the right."""
    tokens: int
    """Without padding."""
    size: int
    """With padding."""

    @property
    def rows(self) -> tuple[int, ...]:
        """By number, in the order of the micro-batch."""
        return tuple(row for tree in self.trees for row in tree.rows)


@dataclass(frozen=True, slots=True)
class TreeCost:
    """When a further row is worth a larger tree. All in units of a token's cost in the layers, attention left out."""

    pair: float
    """Cost of one more pair of tokens in a mask; 0 where attention computes only what a token sees."""

    def joins(self, size: int, new: int, length: int) -> bool:
        """Whether a row of `length` tokens, `new` of them unshared, costs less in a tree of `size` tokens than alone."""
        together = new + self.pair * ((size + new) ** 2 - size**2)
        return new < length and together <= length + self.pair * length**2


def unique_tokens(rows: Sequence[TokenSequence]) -> int:
    """Tokens of the rows' prefix tree."""
    ordered = lexicographic(rows)
    return sum(len(row.tokens) for row in ordered) - sum(overlaps(ordered))


def padded(rows: Sequence[TokenSequence], tokens: int, a_pass: float = PASS) -> list[Cut]:
    """Rows of about equal length together, in micro-batches of at most so many tokens, padding included.

    Cut so that tokens and passes, each of which costs as much as `a_pass` tokens, cost least together. A row that alone
    exceeds the limit is a micro-batch of its own.
    """
    ordered = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    cost = np.full(len(ordered) + 1, np.inf)
    cost[0] = 0.0
    origin = np.zeros(len(ordered) + 1, dtype=np.int64)
    for start, row in enumerate(ordered):
        width = len(row.tokens)
        stops = np.arange(start + 1, min(len(ordered), start + max(1, tokens // width)) + 1)
        here = cost[start] + a_pass + width * (stops - start)
        better = here < cost[stops]
        cost[stops[better]], origin[stops[better]] = here[better], start
    cuts, stop = [], len(ordered)
    while stop:
        start = int(origin[stop])
        trees = tuple(_tree([row], [0]) for row in ordered[start:stop])
        width = max(tree.size for tree in trees)
        cuts.append(Cut(trees, False, sum(tree.size for tree in trees), width * len(trees)))
        stop = start
    return cuts[::-1]


def packed(rows: Sequence[TokenSequence], tokens: int, *, processes: int = 1, blocks: bool = False) -> list[Cut]:
    """Rows one after another in sequences of at most so many tokens (a row that alone exceeds them is alone)."""
    return _fill([_tree([row], [0]) for row in rows], tokens, processes, blocks)


def shared(
    rows: Sequence[TokenSequence],
    tokens: int,
    cost: TreeCost,
    *,
    edge: int | None = None,
    processes: int = 1,
    blocks: bool = False,
) -> list[Cut]:
    """Prefix trees of the rows, one after another in sequences of at most so many tokens; a tree has at most `edge`.

    `blocks`: attention goes by whole blocks, to which sequences are then padded. A row that alone exceeds the limit is
    alone.
    """
    ordered = lexicographic(rows)
    greatest = tokens if edge is None else min(edge, tokens)
    trees: list[tuple[list[TokenSequence], list[int]]] = []
    size = 0
    for row, overlap in zip(ordered, overlaps(ordered), strict=True):
        length = len(row.tokens)
        new = length - overlap
        if trees and size + new <= greatest and cost.joins(size, new, length):
            trees[-1][0].append(row)
            trees[-1][1].append(overlap)
            size += new
        else:
            trees.append(([row], [0]))
            size = length
    return _fill([_tree(*tree) for tree in trees], tokens, processes, blocks)


def _tree(rows: Sequence[TokenSequence], shares: Sequence[int]) -> Tree:
    """Of rows in lexicographic order, which share so many tokens with the one before."""
    lengths = [len(row.tokens) for row in rows]
    return Tree(
        rows=tuple(row.number for row in rows),
        size=sum(lengths) - sum(shares),
        depths=sum(
            (length * (length - 1) - share * (share - 1)) // 2 for length, share in zip(lengths, shares, strict=True)
        ),
        chain=all(share == before for share, before in zip(shares[1:], lengths, strict=False)),
    )


def _fill(trees: Sequence[Tree], tokens: int, processes: int, blocks: bool) -> list[Cut]:
    cuts = []
    for chosen in fill([tree.size for tree in trees], tokens, processes):
        size = sum(trees[index].size for index in chosen)
        padded_size = -(-size // BLOCK) * BLOCK if blocks else size
        cuts.append(Cut(tuple(trees[index] for index in chosen), True, size, padded_size))
    return cuts

"""Assigns rows to micro-batches by their lengths and shared prefixes, before any array is made.

Rows in lexicographic order are the leaves of their prefix tree in depth-first order: each row adds the tokens that it
does not share with the previous row. Trees and single rows are packed end to end into one sequence until it is full;
padded rows are stacked. The assignment changes neither loss nor gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainspan_training.data.bins import fill
from trainspan_training.data.sequences import TokenSequence, lexicographic, overlaps

__all__ = ["BLOCK", "PASS", "Cut", "Tree", "packed", "padded", "shared", "unique_tokens"]

PASS = 256
"""Fixed cost of a forward and backward pass, in tokens (measured: 205 to 273)."""
BLOCK = 128
"""Edge of the blocks computed by compiled flex attention."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows that share a prefix; a single row is a tree that does not branch."""

    rows: tuple[int, ...]
    """Row numbers, in lexicographic order of the rows."""
    size: int
    """Number of tokens, counting shared ones once."""
    depths: int
    """Sum over its tokens of their positions in their own rows."""
    calls: int
    """Number of attention calls on a CPU: one for each run of tokens, and one for the rest of a subtree that branches."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The input of one forward pass."""

    trees: tuple[Tree, ...]
    flat: bool
    """True if trees are packed into one sequence; otherwise rows are stacked, padded on the right."""
    tokens: int
    """Number of tokens without padding."""
    size: int
    """Number of tokens with padding."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Row numbers, in the order of the micro-batch."""
        return tuple(row for tree in self.trees for row in tree.rows)


def unique_tokens(rows: Sequence[TokenSequence]) -> int:
    """Number of tokens in the rows' prefix tree."""
    ordered = lexicographic(rows)
    return sum(len(row.tokens) for row in ordered) - sum(overlaps(ordered))


def padded(rows: Sequence[TokenSequence], tokens: int, a_pass: float = PASS) -> list[Cut]:
    """Groups rows of similar length into micro-batches of at most `tokens` tokens, padding included.

    Minimizes the total cost of tokens and passes, each pass costing as much as `a_pass` tokens. A row that exceeds the
    limit is a micro-batch by itself.
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
    """Packs rows into sequences of at most `tokens` tokens; a row that exceeds the limit gets its own sequence."""
    return _fill([_tree([row], [0]) for row in rows], tokens, processes, blocks)


def shared(
    rows: Sequence[TokenSequence], tokens: int, *, greatest: int = 0, processes: int = 1, blocks: bool = False
) -> list[Cut]:
    """Packs prefix trees of the rows into sequences of at most `tokens` tokens, forwarding as few tokens as possible.

    A rollout with more tokens than that, each counted once, has trees of its own, of at most `greatest` tokens: cut to
    `tokens`, rows that continue one long history would each forward it again. `blocks`: attention works on whole
    blocks, so sequences are padded to them. A row that exceeds the limit gets its own sequence.
    """
    rollouts: dict[str, list[TokenSequence]] = {}
    for row in rows:
        rollouts.setdefault(row.rollout, []).append(row)
    large = [some for some in rollouts.values() if len(some) > 1 and unique_tokens(some) > tokens]
    outside = {some[0].rollout for some in large}
    trees = _trees([row for row in rows if row.rollout not in outside], tokens)
    for some in large:
        trees += _trees(some, max(tokens, greatest))
    return _fill(trees, tokens, processes, blocks)


def _trees(rows: Sequence[TokenSequence], limit: int) -> list[Tree]:
    """Trees of at most `limit` tokens, or of one row, such that the rows' order is cut where they share least."""
    ordered = lexicographic(rows)
    shares = np.asarray(overlaps(ordered), dtype=np.int64)
    ends = np.cumsum([len(row.tokens) for row in ordered] - shares)
    count = len(ordered)
    cost = np.zeros(count + 1, dtype=np.int64)  # of the rows before a place: shared tokens that are forwarded again
    origin = np.zeros(count + 1, dtype=np.int64)
    first = 0
    for last in range(count):
        if not shares[last]:
            first = last
        while first < last and ends[last] - ends[first] + len(ordered[first].tokens) > limit:
            first += 1
        places = cost[first : last + 1] + shares[first : last + 1]
        origin[last + 1] = first + int(places.argmin())
        cost[last + 1] = places.min()
    trees, stop = [], count
    while stop:
        start = int(origin[stop])
        trees.append(_tree(ordered[start:stop], [0, *shares[start + 1 : stop].tolist()]))
        stop = start
    return trees[::-1]


def _tree(rows: Sequence[TokenSequence], shares: Sequence[int]) -> Tree:
    """The tree of rows in lexicographic order; `shares`: number of tokens that each shares with the previous row."""
    lengths = [len(row.tokens) for row in rows]
    return Tree(
        rows=tuple(row.number for row in rows),
        size=sum(lengths) - sum(shares),
        depths=sum(
            (length * (length - 1) - share * (share - 1)) // 2 for length, share in zip(lengths, shares, strict=True)
        ),
        calls=_calls(lengths, shares),
    )


def _calls(lengths: Sequence[int], shares: Sequence[int]) -> int:
    """A row that leaves the previous one within a run adds a run, the rest of the split one, and that branch's rest."""
    calls, branchings = 1, [0]
    for share, before in zip(shares[1:], lengths, strict=False):
        if share == before:
            continue
        while branchings[-1] > share:
            branchings.pop()
        calls += 1 if branchings[-1] == share else 3
        branchings.append(share)
    return calls


def _fill(trees: Sequence[Tree], tokens: int, processes: int, blocks: bool) -> list[Cut]:
    cuts = []
    for chosen in fill([tree.size for tree in trees], tokens, processes):
        size = sum(trees[index].size for index in chosen)
        padded_size = -(-size // BLOCK) * BLOCK if blocks else size
        cuts.append(Cut(tuple(trees[index] for index in chosen), True, size, padded_size))
    return cuts

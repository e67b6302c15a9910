"""Bad words, as vLLM bars them: a word's last token is barred if the completion so far ends with its other tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["LONGEST", "BadWords"]

LONGEST = 64
"""Maximum number of tokens in a word. Longer words are not replayed: replay time grows with this number."""


@dataclass(slots=True)
class _Node:
    """A node in the trie of words without their last tokens, read backwards."""

    before: dict[int, int] = field(default_factory=dict)
    """Preceding token → its node."""
    lasts: list[int] = field(default_factory=list)
    """Last tokens of the words whose other tokens lead to this node."""


class BadWords:
    """Finds the words that could end at each position of a completion; `words` are token ids."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._nodes = [_Node()]
        for *others, last in filter(None, words):
            at = 0
            for token in reversed(others):
                known = self._nodes[at].before
                if token not in known:
                    known[token] = len(self._nodes)
                    self._nodes.append(_Node())
                at = known[token]
            self._nodes[at].lasts.append(last)

    def nodes(self, ids: NDArray[np.int32]) -> list[tuple[int, ...]]:
        """Input of `barred` for each of the tokens (C,); equal if the same tokens are barred for the same reason."""
        tokens: list[int] = ids.tolist()
        return [self._nodes_at(tokens, position) for position in range(len(tokens))]

    def _nodes_at(self, tokens: list[int], position: int) -> tuple[int, ...]:
        at: int | None = 0
        nodes = []
        while at is not None:
            if self._nodes[at].lasts:
                nodes.append(at)
            position -= 1
            at = self._nodes[at].before.get(tokens[position]) if position >= 0 else None
        return tuple(nodes)

    def barred(self, nodes: tuple[int, ...]) -> NDArray[np.int32]:
        """The tokens barred at a position with this result of `nodes`."""
        return np.array([token for node in nodes for token in self._nodes[node].lasts], dtype=np.int32)

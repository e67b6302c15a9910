"""Words that may not come, as vLLM bars them: the last token of a word is barred if the answer's own tokens before are the others."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["LONGEST", "BadWords"]

LONGEST = 64
"""Tokens of a word. Longer ones are not replayed: time follows this number."""


@dataclass(slots=True)
class _Node:
    """A place in the tree of the words without their last tokens, read backwards."""

    before: dict[int, int] = field(default_factory=dict)
    """The token before → its node."""
    lasts: list[int] = field(default_factory=list)
    """The last tokens of the words whose others have been read at this node."""


class BadWords:
    """Finds at each position of a completion which words could end there; `words` are token ids."""

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

    def found(self, ids: NDArray[np.int32]) -> list[tuple[int, ...]]:
        """For each of the tokens (C,) what `barred` needs; equal where the same tokens are barred for the same reason."""
        tokens: list[int] = ids.tolist()
        return [self._found(tokens, place) for place in range(len(tokens))]

    def _found(self, tokens: list[int], place: int) -> tuple[int, ...]:
        at: int | None = 0
        nodes = []
        while at is not None:
            if self._nodes[at].lasts:
                nodes.append(at)
            place -= 1
            at = self._nodes[at].before.get(tokens[place]) if place >= 0 else None
        return tuple(nodes)

    def barred(self, found: tuple[int, ...]) -> NDArray[np.int32]:
        """The tokens that are barred at a position where this was found."""
        return np.array([token for node in found for token in self._nodes[node].lasts], dtype=np.int32)

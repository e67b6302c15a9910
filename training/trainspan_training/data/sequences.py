"""Calls → training rows: the calls of a segment become one row, so that each token is forwarded once per rollout.

A row is a token sequence that records which call sampled which tokens. Every sampled token is trained, conditioned on
exactly the row's preceding tokens. Between two calls are the tokens that the environment wrote: tool results and user turns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trainspan_schemas.errors import DatasetError
from trainspan_training.data.dataset import Call
from trainspan_training.data.token_limits import TokenLimits

__all__ = ["ChatTurns", "Sampled", "TokenSequence", "lexicographic", "make_sequences", "openings_in", "overlaps"]


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """How a chat template marks the turns of the assistant."""

    opening: NDArray[np.int32]
    """(K,) the tokens with which each begins."""
    stops: frozenset[int]
    """The tokens with which one can end."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The C adjacent tokens of a row that one call sampled."""

    call: int
    """The call's index in the dataset."""
    start: int
    """Position of its first token in the row; never 0."""
    logprobs: NDArray[np.float32]
    """(C,) logged when sampled."""
    advantage: float
    """As in the loss: times `negative_weight` if it is negative."""
    temperature: float
    limits: TokenLimits | None = None
    """Limits on its tokens; None if they were unconstrained."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence of T tokens, N of them trained (the flat arrays are in token order)."""

    rollout: str
    group: str
    """Group of rollouts on the same task, with similar prefixes."""
    tokens: NDArray[np.int32]
    """(T,)"""
    sampled: tuple[Sampled, ...]
    """At least one; in token order."""
    observed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(M,) ascending positions of observation tokens, if they are wanted: see `_observed`."""
    unobserved: int = 0
    """Number of tokens between its calls that are not known to be the environment's, if those are wanted."""

    @property
    def number(self) -> int:
        """Unique id of the row in its dataset: the index of its first call."""
        return self.sampled[0].call

    @property
    def n_trained(self) -> int:
        return sum(len(part.logprobs) for part in self.sampled)

    @property
    def positions(self) -> NDArray[np.int64]:
        """(N,) positions of the trained tokens; never 0."""
        return np.concatenate([np.arange(part.start, part.start + len(part.logprobs)) for part in self.sampled])

    @property
    def calls(self) -> NDArray[np.int64]:
        """(N,) index in the dataset of the call that sampled the token."""
        return self._each([part.call for part in self.sampled]).astype(np.int64)

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """(N,) logged when sampled."""
        return np.concatenate([part.logprobs for part in self.sampled]).astype(np.float64)

    @property
    def advantages(self) -> NDArray[np.float64]:
        """(N,)"""
        return self._each([part.advantage for part in self.sampled])

    @property
    def temperatures(self) -> NDArray[np.float64]:
        """(N,)"""
        return self._each([part.temperature for part in self.sampled])

    @property
    def limits(self) -> TokenLimits | None:
        """Limits on the N trained tokens; None if they were unconstrained."""
        return TokenLimits.joined([(part.limits, len(part.logprobs)) for part in self.sampled])

    def weighed(self, weights: Mapping[int, float]) -> NDArray[np.float64]:
        """(N,) the weight of each token's call; `weights` is keyed by the call's index in the dataset."""
        return self._each([weights[part.call] for part in self.sampled])

    def _each(self, values: Sequence[float]) -> NDArray[np.float64]:
        """(N,) the value of each token's call."""
        return np.repeat(np.asarray(values, dtype=np.float64), [len(part.logprobs) for part in self.sampled])


def make_sequences(
    calls: Sequence[Call], *, merge: bool, negative_weight: float = 1.0, turns: ChatTurns | None = None
) -> list[TokenSequence]:
    """One row per segment, or per call without `merge`; in order of first appearance.

    Negative advantages are multiplied by `negative_weight`. With `turns`, rows know their observation tokens.

    A call missing from a segment (because it was not trainable) does no harm: its tokens are in the next call's prompt.
    Raises DatasetError if a call's prompt does not continue its segment exactly.
    """
    if not merge:
        return [_row([call], negative_weight, turns) for call in calls]
    segments: dict[tuple[str, int], list[Call]] = {}
    for call in calls:
        segments.setdefault((call.rollout, call.segment), []).append(call)
    in_order = (sorted(segment, key=lambda call: call.position) for segment in segments.values())
    return [_row(segment, negative_weight, turns) for segment in in_order]


def _row(calls: Sequence[Call], negative_weight: float, turns: ChatTurns | None) -> TokenSequence:
    tokens: list[NDArray[np.int32]] = []
    sampled: list[Sampled] = []
    observed = [np.zeros(0, dtype=np.int64)]
    known = unobserved = 0
    for call in calls:
        again = known - call.prefix_len  # number of prompt tokens already in the row
        if not (0 <= again <= len(call.prompt_ids) and _ends_with(tokens, call.prompt_ids[:again])):
            raise DatasetError(
                f"call {call.index} of rollout {call.rollout} does not continue its segment {call.segment} token by token: "
                "build the dataset again, or train with merge = false"
            )
        start = call.prefix_len + len(call.prompt_ids)
        between = call.prompt_ids[again:]
        if turns and known:
            first, end, left_out = _observed(tokens[-1], between, turns)
            observed.append(np.arange(known + first, known + end))
            unobserved += left_out
        tokens += [between, call.completion_ids]
        known = start + len(call.completion_ids)
        advantage = call.advantage * (negative_weight if call.advantage < 0 else 1.0)
        sampled.append(Sampled(call.number, start, call.logprobs.copy(), advantage, call.temperature, call.limits))
    whole, places = np.concatenate(tokens), np.concatenate(observed)
    return TokenSequence(calls[0].rollout, calls[0].group, whole, tuple(sampled), places, unobserved)


def _observed(answer: NDArray[np.int32], between: NDArray[np.int32], turns: ChatTurns) -> tuple[int, int, int]:
    """First and end of the observation in the tokens between an answer and the next; how many others are not known to be one.

    An observation begins once the answer's turn has ended (with a token of the template's if the answer was cut), and ends where
    a turn of the assistant opens. If another one opens before the next answer, the model or the client wrote what is between
    them. If the turn does not end, or none opens, it is unknown who wrote what.
    """
    openings = openings_in(between, turns)
    first = 0 if int(answer[-1]) in turns.stops else 1
    if not len(openings) or first > openings[0] or (first and int(between[0]) not in turns.stops):
        return 0, 0, len(between)
    return first, int(openings[0]), first + int(openings[-1] - openings[0])


def openings_in(tokens: NDArray[np.int32], turns: ChatTurns) -> NDArray[np.int64]:
    """Ascending positions at which turns of the assistant open."""
    size = len(turns.opening)
    if not size or len(tokens) < size:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero((sliding_window_view(tokens, size) == turns.opening).all(axis=1))


def _ends_with(parts: Sequence[NDArray[np.int32]], tail: NDArray[np.int32]) -> bool:
    """Whether the concatenated parts end with `tail`."""
    return not len(tail) or np.array_equal(np.concatenate(parts)[-len(tail) :], tail)


def lexicographic(rows: Iterable[TokenSequence]) -> list[TokenSequence]:
    """Sorts rows lexicographically by token: the leaves of their prefix tree, depth first."""
    return sorted(rows, key=lambda row: row.tokens.astype(">i4").tobytes())


def overlaps(rows: Sequence[TokenSequence]) -> list[int]:
    """Length of the prefix that each row shares with the previous one."""
    return [0, *(_overlap(a.tokens, b.tokens) for a, b in pairwise(rows))][: len(rows)]


def _overlap(tokens: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(tokens), len(other))
    differing = np.flatnonzero(tokens[:length] != other[:length])
    return int(differing[0]) if len(differing) else length

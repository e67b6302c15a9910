"""Calls → training rows: the calls of a segment become one row, so that each token is forwarded once per rollout.

A row is a token sequence that says of each token which call sampled it, if any. Every sampled token is trained, with
exactly the row's tokens before it as its prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainspan_schemas.errors import DatasetError

from .transitions import Call

__all__ = ["Row", "make_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of T tokens, N of them trained (the flat arrays are in the order of tokens)."""

    rollout: str
    group: str
    """Of rollouts on the same task, whose sequences begin alike."""
    tokens: NDArray[np.int32]
    """(T,)"""
    positions: NDArray[np.int64]
    """(N,) of the trained tokens; never 0."""
    calls: NDArray[np.int64]
    """(N,) index, in the dataset, of the call that sampled the token."""
    logprobs: NDArray[np.float64]
    """(N,) logged when sampled."""
    advantages: NDArray[np.float64]
    """(N,)"""
    temperatures: NDArray[np.float64]
    """(N,)"""

    @property
    def n_trained(self) -> int:
        return len(self.positions)


def make_rows(calls: Sequence[Call], *, merge: bool) -> list[Row]:
    """One row per segment, or per call without `merge`; in order of first appearance.

    A call that is missing from a segment (it was not trainable) costs nothing: its tokens stand in the next call's
    prompt. Raises DatasetError if a call's prompt does not continue its segment exactly.
    """
    if not merge:
        return [_row([(index, call)]) for index, call in enumerate(calls)]
    segments: dict[tuple[str, int], list[tuple[int, Call]]] = {}
    for index, call in enumerate(calls):
        segments.setdefault((call.rollout, call.segment), []).append((index, call))
    return [_row(sorted(segment, key=lambda item: item[1].position)) for segment in segments.values()]


def _row(calls: Iterable[tuple[int, Call]]) -> Row:
    tokens: list[NDArray[np.int32]] = []
    columns: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]] = []
    rollout = group = ""
    known = 0
    temperatures: list[NDArray[np.float64]] = []
    for index, call in calls:
        rollout, group = call.rollout, call.group
        again = known - call.prefix_len  # so many tokens of the prompt stand in the row already
        if not (0 <= again <= len(call.prompt_ids) and _ends_with(tokens, call.prompt_ids[:again])):
            raise DatasetError(
                f"call {call.index} of rollout {rollout} does not continue its segment {call.segment} token by token: "
                "build the dataset again, or train with merge = false"
            )
        start, sampled = call.prefix_len + len(call.prompt_ids), len(call.completion_ids)
        tokens += [call.prompt_ids[again:], call.completion_ids]
        known = start + sampled
        columns.append(
            (
                np.arange(start, start + sampled),
                np.full(sampled, index),
                call.logprobs.astype(np.float64),
                np.full(sampled, call.advantage),
            )
        )
        temperatures.append(np.full(sampled, call.temperature))
    positions, numbers, logprobs, advantages = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Row(
        rollout, group, np.concatenate(tokens), positions, numbers, logprobs, advantages, np.concatenate(temperatures)
    )


def _ends_with(parts: Sequence[NDArray[np.int32]], tail: NDArray[np.int32]) -> bool:
    """Whether the tokens of all parts end with `tail`."""
    return not len(tail) or np.array_equal(np.concatenate(parts)[-len(tail) :], tail)

"""Calls → training rows: the calls of a segment become one row, so that each token is forwarded once.

A row is a token sequence with, per token, whether it is trained and what the loss needs of it. Every trained token was
sampled, with exactly the row's tokens before it as its prompt.
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
    """One sequence of T tokens; values at tokens that are not trained are 0 (temperature 1)."""

    rollout: str
    tokens: NDArray[np.int32]
    """(T,)"""
    trained: NDArray[np.bool_]
    """(T,) True at sampled tokens; never at the first."""
    logprobs: NDArray[np.float64]
    """(T,) logged when sampled."""
    advantages: NDArray[np.float64]
    """(T,)"""
    temperatures: NDArray[np.float64]
    """(T,)"""

    @property
    def n_trained(self) -> int:
        return int(self.trained.sum())


def make_rows(calls: Sequence[Call], *, merge: bool) -> list[Row]:
    """One row per segment, or per call without `merge`; in order of first appearance.

    A call that is missing from a segment (it was not trainable) costs nothing: its tokens stand in the next call's
    prompt. Raises DatasetError where a call's prompt does not continue its segment exactly.
    """
    if not merge:
        return [_row([call]) for call in calls]
    segments: dict[tuple[str, int], list[Call]] = {}
    for call in calls:
        segments.setdefault((call.rollout, call.segment), []).append(call)
    return [_row(sorted(segment, key=lambda call: call.position)) for segment in segments.values()]


def _row(calls: Iterable[Call]) -> Row:
    tokens: list[NDArray[np.int32]] = []
    columns: list[tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]] = []
    so_far = np.zeros(0, dtype=np.int32)
    rollout = ""
    for call in calls:
        rollout = call.rollout
        known = len(so_far)
        if known and not (known <= len(call.prompt_ids) and np.array_equal(call.prompt_ids[:known], so_far)):
            raise DatasetError(
                f"call {call.index} of rollout {rollout} does not continue its segment {call.segment} token by token: "
                "build the dataset again, or train with merge = false"
            )
        added, sampled = len(call.prompt_ids) - known, len(call.completion_ids)
        tokens += [call.prompt_ids[known:], call.completion_ids]
        so_far = np.concatenate([call.prompt_ids, call.completion_ids])
        columns.append(
            (
                np.repeat([False, True], [added, sampled]),
                np.concatenate([np.zeros(added), call.logprobs.astype(np.float64)]),
                np.repeat([0.0, call.advantage], [added, sampled]),
                np.repeat([1.0, call.temperature], [added, sampled]),
            )
        )
    trained, logprobs, advantages, temperatures = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Row(rollout, np.concatenate(tokens), trained, logprobs, advantages, temperatures)

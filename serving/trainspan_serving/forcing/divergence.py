"""How a branch stopped following the stored rollout."""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Final

from trainspan_schemas.telemetry.prefix import ForcedCall
from trainspan_schemas.telemetry.tokens import decode_ids

__all__ = ["DivergedError", "describe_difference"]

_CONTEXT: Final = 12
"""Tokens before the one that differs that are named with it."""


class DivergedError(Exception):
    """The agent made another call than in the stored rollout: this branch says nothing about it."""


def describe_difference(
    calls: Iterable[ForcedCall], prompt_ids: Sequence[int], text_of: Callable[[Sequence[int]], str]
) -> str:
    """Compares a prompt with the most similar of the stored calls: which call, the first token that differs, and the text before."""
    differences = ((_first_difference(decode_ids(call.prompt), prompt_ids), call) for call in calls)
    index, call = max(differences, key=lambda pair: pair[0])
    stored = decode_ids(call.prompt)

    def token(ids: Sequence[int]) -> str:
        return f"{ids[index]} ({text_of([ids[index]])!r})" if index < len(ids) else "the end"

    before = text_of(prompt_ids[max(index - _CONTEXT, 0) : index])
    return (
        f"call {call.index}: the prompt differs from the stored one at token {index} of {len(stored)}: "
        f"{token(prompt_ids)} instead of {token(stored)}" + (f", after {before!r}" if before else "")
    )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip_longest(one, other)) if a != b), len(one))

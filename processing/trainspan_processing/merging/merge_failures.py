"""Why a call does not continue its agent's previous call, derived from token ids alone.

- `fork`: it starts from the same state as the previous call, or from an earlier state (best of n, a retry);
- `retokenization`: a few tokens of the earlier answer were replaced by a few others, and the rest is the same;
- `system_prompt`: the first message is another, and what followed it comes again as it was;
- `template`: the history was rewritten: something was left out or inserted (thinking removed);
- `other`: the prompts have too little in common (another conversation, a compacted context).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["CAUSES", "SHARED", "SHOWN", "Ids", "MergeFailures", "cause_of"]

CAUSES: Final = ("fork", "retokenization", "system_prompt", "template", "other")

_ANCHOR: Final = 4
"""Consecutive equal tokens after which two sequences count as aligned again."""
_SWAPPED: Final = 16
"""Greatest number of tokens that retokenization replaces at a time."""
SHOWN: Final = 24
"""Tokens shown of each side in an example."""
SHARED: Final = 8
"""Common tokens shown before them."""

Ids = NDArray[np.int32]


@dataclass(slots=True)
class MergeFailures:
    """Counts by cause, with the first example of each."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, dict[str, object]] = field(default_factory=dict)

    def add(self, before: tuple[Ids, Ids], prompt: Ids, where: Mapping[str, object]) -> None:
        """Counts one call with `prompt` after the call `before` (prompt, completion); `where` identifies it in an example."""
        cause, at = cause_of(before, prompt)
        self.counts[cause] = self.counts.get(cause, 0) + 1
        if cause not in self.examples:
            earlier = np.concatenate(before)
            self.examples[cause] = {
                **where,
                "differs_at": at,
                "shared": earlier[max(0, at - SHARED) : at].tolist(),
                "earlier": earlier[at : at + SHOWN].tolist(),
                "prompt": prompt[at : at + SHOWN].tolist(),
            }

    def include(self, later: "MergeFailures") -> None:
        """Adds those of later calls."""
        for cause, count in later.counts.items():
            self.counts[cause] = self.counts.get(cause, 0) + count
            self.examples.setdefault(cause, later.examples[cause])


def cause_of(before: tuple[Ids, Ids], prompt: Ids) -> tuple[str, int]:
    """(cause, position of the first difference), for a prompt that does not continue the earlier sequence."""
    earlier = np.concatenate(before)
    shared = min(len(earlier), len(prompt))
    different = np.flatnonzero(earlier[:shared] != prompt[:shared])
    at = int(different[0]) if len(different) else shared
    if at == shared:
        return "fork", at
    opening = len(before[0])
    if _is_in_first_message(before[0], at) and _comes_again(before[0][at:], prompt[at:]):
        return "system_prompt", at
    if 2 * at < opening:
        return "other", at
    was, now = earlier[at:], prompt[at:]
    if _find(now, was[:_ANCHOR]) or _find(was, now[:_ANCHOR]):  # inserted or left out
        return "template", at
    if at >= opening and _in_step_after_a_swap(was, now):
        return "retokenization", at
    return ("template" if _find(now, was[-_ANCHOR:]) else "other"), at


def _is_in_first_message(prompt: Ids, at: int) -> bool:
    """Whether position `at` is in the first of several messages: templates begin each with the same token.

    That is the prompt's first token, or its second if the first comes only once.
    """
    for start in prompt[:2]:
        places = np.flatnonzero(prompt == start)
        if len(places) > 1:
            return at < int(places[1])
    return False


def _comes_again(was: Ids, now: Ids) -> bool:
    """Whether the second half of `was` occurs in `now`."""
    half = was[len(was) // 2 :]
    if len(half) < _ANCHOR or len(half) > len(now):
        return False
    return any(
        np.array_equal(now[start : start + len(half)], half)
        for start in np.flatnonzero(now[: len(now) - len(half) + 1] == half[0]).tolist()
    )


def _in_step_after_a_swap(was: Ids, now: Ids) -> bool:
    """Whether a few tokens became a few others, after which both are equal (up to the end of `was`, if that is near)."""
    for skipped in range(1, min(_SWAPPED, len(was)) + 1):
        rest = was[skipped : skipped + _ANCHOR]
        for taken in range(1, _SWAPPED + 1):
            follows = now[taken : taken + len(rest)]
            if len(rest) and len(follows) == len(rest) and np.array_equal(follows, rest):
                return True
    return False


def _find(tokens: Ids, pattern: Ids) -> bool:
    """Whether `pattern` (a whole anchor) occurs in `tokens`."""
    if len(pattern) < _ANCHOR or len(tokens) < _ANCHOR:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(tokens, _ANCHOR)
    return bool((windows == pattern).all(axis=1).any())

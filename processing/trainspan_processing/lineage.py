"""Lineage: which calls continue which, token for token.

A call extends the open segment whose whole token sequence (its last call's prompt and completion) is the longest exact
prefix of the call's prompt; else it opens a segment. Extending changes the segment's sequence, so that a second call from
the same state (best of n, a retry, parallel agents) opens one of its own. Adjacency plays no part: the calls of concurrent
sub-agents interleave.

Sequences are found by a polynomial prefix hash modulo 2^64 and then compared exactly, so that cost is linear in tokens.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tokens", "trace_lineage"]

_BASE: Final = np.uint64(0x9E3779B97F4A7C15)  # odd; a hash only proposes, `array_equal` decides

Int = NDArray[np.int64]


class Tokens:
    """C lists of int32 in one array: list c is `values[offsets[c]:offsets[c + 1]]`."""

    __slots__ = ("lengths", "offsets", "values")

    def __init__(self, values: NDArray[np.int32], offsets: Int) -> None:
        self.values, self.offsets = values, offsets
        self.lengths: Int = np.diff(offsets)

    def __getitem__(self, call: int) -> NDArray[np.int32]:
        return self.values[self.offsets[call] : self.offsets[call + 1]]


def trace_lineage(strands: NDArray[np.int64], prompts: Tokens, completions: Tokens) -> tuple[Int, Int, Int]:
    """(segment, segment_pos, prefix_len), each (C,) int64, for C calls sorted by strand, then by their order in it.

    A strand is what may be merged at all: the calls of one rollout with one policy and temperature. `segment` counts from 0
    in each strand. `prefix_len` is the length of the sequence that the call extends, 0 for a segment's first call.
    """
    count = len(strands)
    segment, position, prefix = (np.zeros(count, dtype=np.int64) for _ in range(3))
    starts = np.flatnonzero(np.diff(strands, prepend=strands[0] - 1)) if count else np.empty(0, dtype=np.int64)
    ends = np.append(starts[1:], count)
    several = ends - starts > 1
    if several.any():
        hashes = _Hashes(prompts, completions)
        for start, end in zip(starts[several].tolist(), ends[several].tolist(), strict=True):
            _trace_strand(start, end, hashes, prompts, completions, segment, position, prefix)
    return segment, position, prefix


class _Hashes:
    """Hashes of prompts' prefixes and of whole sequences (prompt then completion)."""

    __slots__ = ("_cumulative", "_offsets", "sequence_lengths", "sequences")

    def __init__(self, prompts: Tokens, completions: Tokens) -> None:
        self.sequence_lengths: Int = prompts.lengths + completions.lengths
        powers = _powers(int(self.sequence_lengths.max(initial=0)) + 1)
        self._cumulative = _cumulative(prompts, powers, np.zeros_like(prompts.lengths))
        self._offsets = prompts.offsets
        tails = _cumulative(completions, powers, prompts.lengths)
        whole_prompts = self._cumulative[prompts.offsets[1:]] - self._cumulative[prompts.offsets[:-1]]
        whole_tails = tails[completions.offsets[1:]] - tails[completions.offsets[:-1]]
        self.sequences = whole_prompts + whole_tails

    def of_prefixes(self, call: int, lengths: Int) -> NDArray[np.uint64]:
        """Hashes of the prompt's first tokens, for each of `lengths`."""
        start = int(self._offsets[call])
        hashes: NDArray[np.uint64] = self._cumulative[start + lengths] - self._cumulative[start]
        return hashes

    def of_prefix(self, call: int, length: int) -> int:
        start = int(self._offsets[call])
        # Modulo 2^64 by hand: a scalar difference of numpy would warn.
        return (int(self._cumulative[start + length]) - int(self._cumulative[start])) & 0xFFFFFFFFFFFFFFFF


def _powers(count: int) -> NDArray[np.uint64]:
    powers = np.full(count, _BASE, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _cumulative(tokens: Tokens, powers: NDArray[np.uint64], shifts: Int) -> NDArray[np.uint64]:
    """(T + 1,) running sum of (token + 1)·base^(place in its list + shift of its list)."""
    first = tokens.offsets[0] if len(tokens.offsets) else 0
    values = tokens.values[first : tokens.offsets[-1]]
    places = np.arange(len(values)) - np.repeat(tokens.offsets[:-1] - first - shifts, tokens.lengths)
    terms = (values.astype(np.uint64) + np.uint64(1)) * powers[places]
    sums = np.zeros(int(first) + len(values) + 1, dtype=np.uint64)
    np.cumsum(terms, out=sums[int(first) + 1 :])
    return sums


_FEW: Final = 8


def _trace_strand(
    start: int,
    end: int,
    hashes: _Hashes,
    prompts: Tokens,
    completions: Tokens,
    segment: Int,
    position: Int,
    prefix: Int,
) -> None:
    """Fills the three outputs for the calls start … end − 1. `last[s]` is the newest call of open segment s."""
    last: list[int] = []
    lengths = np.empty(end - start, dtype=np.int64)
    wholes = np.empty(end - start, dtype=np.uint64)
    for call in range(start, end):
        opened = len(last)
        found = -1
        for candidate in _candidates(call, opened, hashes, prompts, lengths, wholes):
            if _is_prefix(prompts[call], prompts[last[candidate]], completions[last[candidate]]):
                found = candidate
                break
        if found >= 0:
            prefix[call], position[call] = lengths[found], position[last[found]] + 1
            last[found] = call
        else:
            found = opened
            last.append(call)
        segment[call] = found
        lengths[found], wholes[found] = hashes.sequence_lengths[call], hashes.sequences[call]


def _candidates(
    call: int, opened: int, hashes: _Hashes, prompts: Tokens, lengths: Int, wholes: NDArray[np.uint64]
) -> list[int]:
    """Open segments whose hash is that of a prefix of the prompt, the longest first, the older of equals first."""
    limit = int(prompts.lengths[call])
    if opened <= _FEW:
        few = [
            (-int(lengths[item]), item)
            for item in range(opened)
            if lengths[item] <= limit and hashes.of_prefix(call, int(lengths[item])) == int(wholes[item])
        ]
        return [item for _, item in sorted(few)]
    fitting = np.flatnonzero(lengths[:opened] <= limit)
    matching = fitting[hashes.of_prefixes(call, lengths[fitting]) == wholes[fitting]]
    return [int(item) for item in matching[np.argsort(-lengths[matching], kind="stable")]]


def _is_prefix(prompt: NDArray[np.int32], head: NDArray[np.int32], tail: NDArray[np.int32]) -> bool:
    split = len(head)
    return bool(np.array_equal(prompt[:split], head) and np.array_equal(prompt[split : split + len(tail)], tail))

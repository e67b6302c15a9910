"""Lineage: finds the calls that continue other calls, token for token.

A call extends the open segment whose whole token sequence (its last call's prompt and completion) is the longest exact
prefix of the call's prompt; else it opens a segment. Extending changes the segment's sequence, so a second call from the
same state (best of n, a retry, parallel agents) opens a new segment. Adjacency is not required: the calls of concurrent
sub-agents interleave.

Plain conversations are compared call by call. Otherwise, sequences are found by a polynomial prefix hash modulo 2^64 and
then compared exactly. Both are linear in tokens.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainspan_processing.read.tokens import Int, Tokens

__all__ = ["trace_lineage"]

_BASE: Final = np.uint64(0x9E3779B97F4A7C15)  # odd; a hash only proposes, a comparison decides


def trace_lineage(strands: Int, prompts: Tokens, completions: Tokens) -> tuple[Int, Int, Int, Int]:
    """(segment, segment_pos, prefix_len, parent), each (C,) int64, for C calls sorted by strand, then by their order in it.

    A strand contains the calls that may be merged at all: those of one rollout with one policy and temperature. `segment`
    counts from 0 in each strand. `prefix_len` is the length of the sequence that the call extends, 0 for a segment's first
    call. `parent` is the row of the call whose whole sequence is the longest exact prefix of the prompt, even if another
    call has already extended it (best of n, a retry); −1 without such a call.
    """
    count = len(strands)
    segment, position, prefix = (np.zeros(count, dtype=np.int64) for _ in range(3))
    parent = np.full(count, -1, dtype=np.int64)
    starts = np.flatnonzero(np.diff(strands, prepend=strands[0] - 1)) if count else np.empty(0, dtype=np.int64)
    ends = np.append(starts[1:], count)
    sizes = prompts.lengths + completions.lengths
    continues = _continues(strands, prompts, completions)
    plain = np.add.reduceat(continues, starts) == ends - starts - 1 if count else np.empty(0, dtype=np.bool_)
    first = np.repeat(starts, ends - starts)
    later = np.flatnonzero(np.repeat(plain, ends - starts) & (np.arange(count) > first))
    position[later] = later - first[later]
    prefix[later], parent[later] = sizes[later - 1], later - 1
    for start, end in zip(starts[~plain].tolist(), ends[~plain].tolist(), strict=True):
        here, calls = slice(start, end), np.arange(start, end)
        *traced, parents = _trace_strand(prompts.select(calls), completions.select(calls))
        segment[here], position[here], prefix[here] = traced
        parent[here] = np.where(parents >= 0, parents + start, -1)
    return segment, position, prefix, parent


def _continues(strands: Int, prompts: Tokens, completions: Tokens) -> Int:
    """(C,) 1 if a call's prompt begins with the whole previous call of its strand, else 0."""
    continues = np.zeros(len(strands), dtype=np.int64)
    fits = (strands[1:] == strands[:-1]) & (prompts.lengths[:-1] + completions.lengths[:-1] <= prompts.lengths[1:])
    heads, tails = (tokens.values.view(np.uint8).data for tokens in (prompts, completions))
    size = prompts.values.itemsize
    starts, answers = ((tokens.starts * size).tolist() for tokens in (prompts, completions))
    ends, answer_ends = (((tokens.starts + tokens.lengths) * size).tolist() for tokens in (prompts, completions))
    later, prompt = -1, b""
    for call in np.flatnonzero(fits).tolist():
        head = prompt if call == later else bytes(heads[starts[call] : ends[call]])
        later = call + 1
        prompt = bytes(heads[starts[later] : ends[later]])
        tail = tails[answers[call] : answer_ends[call]]
        continues[later] = prompt.startswith(head) and prompt.startswith(tail, len(head))
    return continues


def _trace_strand(prompts: Tokens, completions: Tokens) -> tuple[Int, Int, Int, Int]:
    """The lineage of one strand; `last[s]` is the newest call of open segment s."""
    count = len(prompts.lengths)
    segment, position, prefix = (np.zeros(count, dtype=np.int64) for _ in range(3))
    parent = np.full(count, -1, dtype=np.int64)
    sizes = prompts.lengths + completions.lengths
    powers = _powers(int(sizes.max()))
    last: list[int] = []
    lengths = np.empty(count, dtype=np.int64)
    wholes = np.empty(count, dtype=np.uint64)
    closed = 0  # number of calls that were extended; below: their sequences' lengths, the calls, their hashes
    closed_lengths, closed_calls = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    closed_wholes = np.empty(count, dtype=np.uint64)
    for call in range(count):
        prompt = prompts[call]
        hashes = _prefix_hashes(prompt, powers)
        fitting = np.flatnonzero(lengths[: len(last)] <= len(prompt))
        matching = fitting[hashes[lengths[fitting]] == wholes[fitting]]
        chosen = len(last)
        for candidate in matching[np.argsort(-lengths[matching], kind="stable")].tolist():
            if _is_prefix(prompt, prompts[last[candidate]], completions[last[candidate]]):
                chosen = candidate
                break
        longest = int(lengths[chosen]) if chosen < len(last) else 0
        parent[call] = last[chosen] if longest else -1
        known = closed_lengths[:closed]
        longer = np.flatnonzero((known > longest) & (known <= len(prompt)))
        longer = longer[hashes[known[longer]] == closed_wholes[longer]]
        for item in closed_calls[longer[np.argsort(-known[longer], kind="stable")]].tolist():
            if _is_prefix(prompt, prompts[item], completions[item]):
                parent[call] = item
                break
        if chosen < len(last):
            prefix[call], position[call] = longest, position[last[chosen]] + 1
            closed_lengths[closed], closed_wholes[closed], closed_calls[closed] = longest, wholes[chosen], last[chosen]
            closed += 1
            last[chosen] = call
        else:
            last.append(call)
        segment[call] = chosen
        lengths[chosen] = sizes[call]
        tail = _prefix_hashes(completions[call], powers[len(prompt) :])
        wholes[chosen] = np.add(hashes[-1:], tail[-1:])[0]  # arrays, since a scalar sum would warn of the overflow
    return segment, position, prefix, parent


def _powers(count: int) -> NDArray[np.uint64]:
    """(count,) powers of the base modulo 2^64."""
    powers = np.full(count, _BASE, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _prefix_hashes(tokens: NDArray[np.int32], powers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """(T + 1,) hashes Σ (token + 1)·power of the first 0 … T tokens."""
    hashes = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)], out=hashes[1:])
    return hashes


def _is_prefix(prompt: NDArray[np.int32], head: NDArray[np.int32], tail: NDArray[np.int32]) -> bool:
    split = len(head)
    return bool(np.array_equal(prompt[:split], head) and np.array_equal(prompt[split : split + len(tail)], tail))

"""Comparisons on a busy machine: many short turns, compared in pairs.

Load that disturbs one turn disturbs its neighbor too, so ratios and differences within a round vary less than the figures
themselves, and the median over rounds is robust to disturbed ones.
"""

import statistics
from collections.abc import Iterator, Sequence
from math import comb
from typing import TypeVar

__all__ = ["mean", "rotated", "summary"]

T = TypeVar("T")


def rotated(items: Sequence[T], rounds: int) -> Iterator[Sequence[T]]:
    """Yields the items once per round, rotated by one each time, so that their order of succession varies."""
    for number in range(rounds):
        place = number % len(items)
        yield [*items[place:], *items[:place]]


def summary(values: Sequence[float], digits: int) -> str:
    """The median, its 95 % interval (by ranks: no shape is assumed), and the quartiles."""
    ordered = sorted(values)
    low, high = _ranks(len(ordered))
    first, _, third = statistics.quantiles(ordered, n=4)
    return (
        f"{statistics.median(ordered):.{digits}f} (95 % {ordered[low]:.{digits}f} to {ordered[high]:.{digits}f}; "
        f"half of {len(ordered)} rounds {first:.{digits}f} to {third:.{digits}f})"
    )


def mean(values: Sequence[float], digits: int) -> str:
    """The mean with its standard error, for events that occur only occasionally, such as exports."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f} (mean of {len(values)} rounds)"


def _ranks(count: int) -> tuple[int, int]:
    """Ranks, from 0, of the bounds of the median's 95 % interval."""
    below, low = 1 / 2**count, 0
    while low + 1 < count / 2 and below + comb(count, low + 1) / 2**count <= 0.025:
        low += 1
        below += comb(count, low) / 2**count
    return low, count - 1 - low

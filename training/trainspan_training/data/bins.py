"""Bin packing: as few bins as possible, and balanced if several processes share them."""

import heapq
from collections.abc import Sequence

import numpy as np

__all__ = ["fill"]


def fill(sizes: Sequence[int], limit: int, multiple: int = 1) -> list[list[int]]:
    """Indexes of the sizes by bin. No bin exceeds the limit, except one that holds a single oversized item.

    First-fit decreasing, which needs at most 11/9 of the optimal number of bins, plus one (Johnson, 1973). The number
    of bins is then rounded up to a multiple of `multiple`, and sizes are spread evenly over them if the limit allows.
    """
    order = sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True)
    free = np.full(len(sizes), limit, dtype=np.int64)
    bins: list[list[int]] = []
    for index in order:
        fitting = np.flatnonzero(free[: len(bins)] >= sizes[index])
        bin_index = int(fitting[0]) if len(fitting) else len(bins)
        if bin_index == len(bins):
            bins.append([])
        bins[bin_index].append(index)
        free[bin_index] -= sizes[index]
    wanted = min(-(-len(bins) // multiple) * multiple, len(sizes))
    even = _spread(sizes, order, wanted)
    fits = all(len(chosen) == 1 or sum(sizes[index] for index in chosen) <= limit for chosen in even)
    return even if fits else bins


def _spread(sizes: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """Puts each size, largest first, into the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    least = [(0, bin_index) for bin_index in range(count)]
    for index in order:
        filled, bin_index = heapq.heappop(least)
        bins[bin_index].append(index)
        heapq.heappush(least, (filled + sizes[index], bin_index))
    return bins

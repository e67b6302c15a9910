"""Peak memory of a piece of work, from the kernel's own count."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGEST = 32 * 2**20
"""The threshold that glibc comes to by itself as large blocks are freed; it no longer adapts once it was set."""


def peak(work: Callable[[], object], *, warm_up: Callable[[], object] = lambda: None) -> int:
    """Peak resident memory of `work` in bytes, above what was resident after the `warm_up`.

    Blocks of 64 KiB and more are mapped one by one, so that the count has nothing that the allocator keeps or reuses.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 65_536)
    try:
        warm_up()
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        before = _resident("VmRSS")
        work()
        return _resident("VmHWM") - before
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

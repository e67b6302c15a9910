"""Memory of a process through which megabytes flow each second: little of what is freed is kept, garbage is looked for rarely."""

import atexit
import ctypes
import gc
from typing import Final

__all__ = ["bound_freed_memory", "collect_rarely"]

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def bound_freed_memory(block_bytes: int, kept_bytes: int) -> None:
    """Freed blocks of `block_bytes` and more, and what is free beyond `kept_bytes`, go back to the system; glibc only.

    Left alone, glibc gives each thread of the receiver an arena of its own, which keeps what was freed in it, and raises the
    size of blocks to 32 MiB. Where every block goes back, fetching and clearing its pages takes a fifth of the receiver's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, block_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
        mallopt(_M_ARENA_MAX, 2)


def collect_rarely() -> None:
    """Looks for reference cycles after 100,000 new objects instead of 700: rows are made by the thousand and have none."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # DuckDB's bindings would report what is frozen at the end as leaks
    gc.set_threshold(100_000, 20, 50)

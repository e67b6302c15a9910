"""Memory of a process through which megabytes flow each second: what is freed goes back, and garbage is looked for rarely."""

import atexit
import ctypes
import gc
from typing import Final

__all__ = ["collect_rarely", "give_back_freed_memory"]

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def give_back_freed_memory() -> None:
    """Blocks of 128 KiB and more go back to the system when freed, and threads share two arenas. glibc only, else nothing.

    Left alone, glibc raises that threshold to 32 MiB and gives each of the receiver's threads an arena of its own, which keeps
    what was freed in it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        mallopt(_M_ARENA_MAX, 2)


def collect_rarely() -> None:
    """Looks for reference cycles after 100,000 new objects instead of 700: rows are made by the thousand and have none."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # DuckDB's bindings would report what is frozen at the end as leaks
    gc.set_threshold(100_000, 20, 50)

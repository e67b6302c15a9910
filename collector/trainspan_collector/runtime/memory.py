"""Memory of a process through which megabytes flow each second: little of what is freed is kept, garbage is looked for rarely.

And how much there is of it.
"""

import atexit
import ctypes
import gc
import os
from pathlib import Path
from typing import Final

__all__ = ["available_memory_bytes", "bound_freed_memory", "collect_rarely"]

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


def available_memory_bytes(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Of the machine, or of the control group that this process is in, if that or one above it has less.

    `membership` has lines `number:controllers:/path`; version 2 has one, with no controllers.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no such groups here
        return limits[0]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (groups, "memory.max") if not controllers else (groups / "memory", "memory.limit_in_bytes")
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            limits += _limit(each / name)
            if each == root:
                break
    return min(limits)


def _limit(file: Path) -> list[int]:
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):  # a container may see its own group as the root; "max" is none
        return []

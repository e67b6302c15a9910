"""Names the clock of this machine, so that two processes can tell whether their times can be compared."""

import functools
from pathlib import Path
from typing import Final

__all__ = ["clock_id"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def clock_id() -> str | None:
    """The id of the running kernel, which all processes and containers on it share; None if there is none (not on Linux)."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None

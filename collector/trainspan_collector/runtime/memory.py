"""Memory of a process that handles megabytes per second: little freed memory is kept, and garbage is rarely collected.

Also keeps pandas out.
"""

import atexit
import ctypes
import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

import pyarrow as pa

__all__ = ["bound_freed_memory", "collect_rarely", "keep_pandas_out"]

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def bound_freed_memory(block_bytes: int, kept_bytes: int) -> None:
    """Returns freed blocks of `block_bytes` and more, and free memory beyond `kept_bytes`, to the system; glibc only.

    By default, glibc gives each of the receiver's threads its own arena, which keeps what was freed in it, and raises the size
    of blocks to 32 MiB. If every block is returned, fetching and clearing its pages takes a fifth of the receiver's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, block_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
        mallopt(_M_ARENA_MAX, 2)


def collect_rarely() -> None:
    """Checks for reference cycles after 100,000 new objects instead of 700: rows are made by the thousands and have none."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else DuckDB's bindings report what is frozen at exit as leaks
    gc.set_threshold(100_000, 20, 50)


class _NoPandas:
    """An import finder to which pandas is not installed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)
        return None


def keep_pandas_out() -> None:
    """Makes pyarrow regard pandas as not installed, for the life of the process.

    If it is installed, pyarrow imports it when it first makes an array of Python values, to see whether they are a Series:
    a quarter of a second, and 48 MiB.
    """
    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([None])  # pyarrow looks for it once
    finally:
        sys.meta_path.remove(_NoPandas)

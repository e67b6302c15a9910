"""Searches the bytes of files for purged ids: the final check that nothing is left."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["find_bytes", "needles"]

_MOST_IDS: Final = 100


def needles(trace_ids: Sequence[str]) -> list[bytes]:
    """The first hundred ids in both forms that files contain: text, and the 16 bytes of OTLP."""
    return [form for trace_id in trace_ids[:_MOST_IDS] for form in (trace_id.encode(), bytes.fromhex(trace_id))]


def find_bytes(path: Path, wanted: Sequence[bytes]) -> bool:
    """Whether any of `wanted` occurs in the file."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(needle) >= 0 for needle in wanted)

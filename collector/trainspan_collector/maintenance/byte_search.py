"""Searches the bytes of files for purged ids: the final check that nothing is left."""

import mmap
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import Final

__all__ = ["find_bytes", "find_id", "needles"]

_TRACE_ID: Final = re.compile("[0-9a-f]{32}")
_FORM_BYTES: Final = (16, 32)


def needles(trace_ids: Iterable[str], most: int | None = None) -> list[bytes]:
    """The first `most` ids, or all, in both forms that files contain: the 16 bytes of OTLP, and text.

    Others than 32 hex digits are left out: senders choose the ids in links, and a single byte is in every file.
    """
    whole = islice(filter(_TRACE_ID.fullmatch, trace_ids), most)
    return [form for trace_id in whole for form in (bytes.fromhex(trace_id), trace_id.encode())]


def find_bytes(path: Path, wanted: Sequence[bytes]) -> bool:
    """Whether any of `wanted` occurs in the file."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(needle) >= 0 for needle in wanted)


def find_id(path: Path, wanted: AbstractSet[bytes]) -> bool:
    """Whether any of `wanted`, which are `needles`, occurs in the file: one pass, however many they are."""
    if not wanted:
        return False
    data = path.read_bytes()
    first_bytes = re.compile(b"[" + re.escape(bytes({form[0] for form in wanted})) + b"]")
    starts = (match.start() for match in first_bytes.finditer(data))
    return any(data[start : start + n_bytes] in wanted for start in starts for n_bytes in _FORM_BYTES)

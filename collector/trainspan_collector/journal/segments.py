"""The journal's files: segments of frames named `NNNNNNNNNNNN-MARKER.journal`, positions in them, and reading from one.

The marker is in the name, since damage to a file's bytes leaves its name intact.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from trainspan_collector.journal.frames import Damage, Frame, scan_frames
from trainspan_schemas.errors import StoreError

__all__ = [
    "SUFFIX",
    "JournalEntry",
    "LoadProgress",
    "Position",
    "Segment",
    "marker_of",
    "read_segments",
    "segment_name",
    "segment_number",
]

log = logging.getLogger(__name__)

SUFFIX: Final = ".journal"
_NAME: Final = re.compile(rf"[0-9]{{12,}}-[0-9a-f]{{16}}{re.escape(SUFFIX)}")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place between two frames; positions compare in journal order."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the store is loaded: a row of `stored.progress`."""

    position: Position
    last_seq: int


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An acknowledged request and its position."""

    frame: Frame
    start: Position
    end: Position


class Segment(NamedTuple):
    """A file, and the size up to which it is whole."""

    name: str
    size: int


def segment_name(number: int, marker: bytes) -> str:
    return f"{number:012d}-{marker.hex()}{SUFFIX}"


def segment_number(path: Path) -> int:
    """Raises StoreError if the file's name is not that of a segment."""
    if not _NAME.fullmatch(path.name):
        raise StoreError(f"{path} is not a journal file of this trainspan: move it out of the folder")
    return int(path.name.partition("-")[0])


def marker_of(name: str) -> bytes:
    """The marker of the segment with this name."""
    return bytes.fromhex(name.removesuffix(SUFFIX).partition("-")[2])


def read_segments(
    folder: Path, segments: Mapping[int, Segment], position: Position, max_bytes: int
) -> tuple[list[JournalEntry], Position]:
    """Requests after `position`, about `max_bytes` but at least one if there is any, and where they end.

    Damage is skipped with a warning; requests after it are found.
    """
    for number in sorted(number for number in segments if number >= position.segment):
        start = position.offset if number == position.segment else 0
        if start < segments[number].size:
            return _read_segment(folder, number, start, segments[number], max_bytes)
    return [], position


def _read_segment(
    folder: Path, segment: int, start: int, whole: Segment, max_bytes: int
) -> tuple[list[JournalEntry], Position]:
    wanted, size, marker = max_bytes, whole.size, marker_of(whole.name)
    while True:
        with (folder / whole.name).open("rb") as file:
            file.seek(start)
            data = file.read(min(wanted, size - start))
        is_cut = len(data) < min(wanted, size - start)  # the file is shorter than what was written to it
        complete = is_cut or start + len(data) >= size
        entries: list[JournalEntry] = []
        end = start
        for item in scan_frames(data, marker, complete=complete):
            begin, end = end, start + item.end
            if isinstance(item, Damage):
                _warn_of_damage(segment, begin, end)
            else:
                entries.append(JournalEntry(item, Position(segment, begin), Position(segment, end)))
            if wanted > max_bytes:  # the read was enlarged for this request alone
                break
        if is_cut and end == start + len(data):
            _warn_of_damage(segment, end, size)
            return entries, Position(segment, size)
        if end > start or complete:
            return entries, Position(segment, end)
        wanted *= 2


def _warn_of_damage(segment: int, begin: int, end: int) -> None:
    log.warning("journal damage segment=%d from=%d to=%d bytes_skipped=%d", segment, begin, end, end - begin)

"""The journal's files: segments `NNNNNNNNNNNN.journal` of frames, places in them, and reading on from one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainspan_collector.frames import Damage, Frame, scan_frames

__all__ = ["SUFFIX", "Entry", "Position", "Progress", "read_segments", "segment_path"]

log = logging.getLogger(__name__)

SUFFIX: Final = ".journal"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place between two frames; positions compare in journal order."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the store is loaded: a row of `stored.progress`."""

    position: Position
    last_seq: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An acknowledged request and where it lies."""

    frame: Frame
    start: Position
    end: Position


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:012d}{SUFFIX}"


def read_segments(
    folder: Path, sizes: Mapping[int, int], position: Position, max_bytes: int
) -> tuple[list[Entry], Position]:
    """Requests after `position`, of about `max_bytes` but at least one where there is one, and where they end.

    `sizes` says how much of each segment is whole. Damage is skipped with a warning; requests after it are found.
    """
    for segment in sorted(segment for segment in sizes if segment >= position.segment):
        start = position.offset if segment == position.segment else 0
        if start < sizes[segment]:
            return _read_segment(folder, segment, start, sizes[segment], max_bytes)
    return [], position


def _read_segment(folder: Path, segment: int, start: int, size: int, max_bytes: int) -> tuple[list[Entry], Position]:
    wanted = max_bytes
    while True:
        with segment_path(folder, segment).open("rb") as file:
            file.seek(start)
            data = file.read(min(wanted, size - start))
        complete = start + len(data) >= size
        entries: list[Entry] = []
        end = start
        for item in scan_frames(data, complete=complete):
            begin, end = end, start + item.end
            if isinstance(item, Damage):
                log.warning(
                    "journal damage segment=%d from=%d to=%d bytes_skipped=%d",
                    segment, start + item.start, end, item.end - item.start,
                )  # fmt: skip
            else:
                entries.append(Entry(item, Position(segment, begin), Position(segment, end)))
            if wanted > max_bytes:  # read on for the sake of this one
                break
        if end > start or complete:
            return entries, Position(segment, end)
        wanted *= 2

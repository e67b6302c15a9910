"""Rows that come in the order of the stores, divided among the chunks of a file, which may have another order."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

__all__ = ["CHUNK", "Shuffle"]

_ROWS_OF_RUN: Final = 64
"""Where runs of rows of one chunk have at least as many in the mean, no row is copied."""

CHUNK: Final = "chunk"
HELD_BYTES: Final = 64 * 2**20
"""Rows of one kind that wait in memory for the rest of their chunk; half of them stay if more come."""


class Shuffle:
    """Rows of one kind by their chunk: in memory, and beyond `held_bytes` in files, those of the last chunks first."""

    def __init__(self, new_folder: Callable[[], Path], held_bytes: int | None = None) -> None:
        """`new_folder` makes the empty folder for the files; it is called at most once, when the first file is needed."""
        self._new_folder = new_folder
        self._folder: Path | None = None
        self._most_bytes = HELD_BYTES if held_bytes is None else held_bytes
        self._held: dict[int, list[pl.DataFrame]] = defaultdict(list)
        self._bytes: dict[int, int] = defaultdict(int)
        self._in_files: set[int] = set()

    def add(self, rows: pl.DataFrame) -> None:
        """Appends rows to those of their `chunk`."""
        if rows.is_empty():
            return
        for chunk, part in _parts(rows):
            if chunk in self._in_files:
                self._write(chunk, [part])
            else:
                self._held[chunk].append(part)
                self._bytes[chunk] += int(part.estimated_size())
        if sum(self._bytes.values()) > self._most_bytes:
            self._make_room()

    def pop(self, chunk: int) -> list[pl.DataFrame]:
        """The rows of a chunk without `chunk`, as they were added; they are then removed here."""
        self._bytes.pop(chunk, None)
        if chunk not in self._in_files:
            return self._held.pop(chunk, [])
        self._in_files.remove(chunk)
        path = self._file(chunk)
        frames = _streams(path)
        path.unlink()  # its pages stay mapped as long as the frames
        return frames

    def _make_room(self) -> None:
        """Writes the chunks that are taken last."""
        total = sum(self._bytes.values())
        for chunk in sorted(self._held, reverse=True):
            if 2 * total <= self._most_bytes:
                return
            total -= self._bytes.pop(chunk)
            self._in_files.add(chunk)
            self._write(chunk, self._held.pop(chunk))

    def _write(self, chunk: int, frames: list[pl.DataFrame]) -> None:
        # Closed at once: a file of long calls has more chunks than a process may have open files.
        with self._file(chunk).open("ab") as file:
            for frame in frames:
                frame.write_ipc_stream(file)

    def _file(self, chunk: int) -> Path:
        self._folder = self._folder or self._new_folder()
        return self._folder / str(chunk)


def _parts(rows: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    """Chunks and rows of them, without `chunk`, in order."""
    chunks = rows[CHUNK].to_numpy()
    starts = np.flatnonzero(np.append(True, chunks[1:] != chunks[:-1]))
    if len(starts) * _ROWS_OF_RUN > rows.height:
        parts = rows.partition_by(CHUNK, as_dict=True, include_key=False, maintain_order=True)
        return [(int(str(chunk)), frame) for (chunk,), frame in parts.items()]
    frame = pl.DataFrame([column for column in rows.get_columns() if column.name != CHUNK])
    ends = (*starts[1:].tolist(), rows.height)
    return [(int(chunks[start]), frame[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]


def _streams(path: Path) -> list[pl.DataFrame]:
    """The frames of a file of Arrow IPC streams, one after another."""
    import pyarrow as pa

    frames, size = [], path.stat().st_size
    with pa.memory_map(str(path)) as file:
        while file.tell() < size:
            frame = pl.from_arrow(pa.ipc.open_stream(file).read_all(), rechunk=False)
            assert isinstance(frame, pl.DataFrame)
            frames.append(frame)
    return frames

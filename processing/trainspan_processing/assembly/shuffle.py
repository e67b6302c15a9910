"""Rows that come in the order of the stores, divided among the chunks of a file, which has another order."""

from collections import defaultdict
from pathlib import Path
from typing import Final

import polars as pl

__all__ = ["CHUNK", "Shuffle"]

CHUNK: Final = "chunk"


class Shuffle:
    """Rows of one kind by their chunk, in files of an empty folder; without a folder they stay in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[int, list[pl.DataFrame]] = defaultdict(list)

    def add(self, rows: pl.DataFrame) -> None:
        """Appends rows to those of their `chunk`."""
        for (chunk,), own in rows.partition_by(CHUNK, as_dict=True, include_key=False).items():
            if self._folder is None:
                self._held[int(str(chunk))].append(own)
                continue
            # Closed at once: a file of long calls has more chunks than a process may have open files.
            with (self._folder / str(chunk)).open("ab") as file:
                own.write_ipc_stream(file, compression="lz4")

    def take(self, chunk: int) -> list[pl.DataFrame]:
        """The rows of a chunk without `chunk`, as they were added; they are then removed here."""
        if self._folder is None:
            return self._held.pop(chunk, [])
        path = self._folder / str(chunk)
        if not path.exists():
            return []
        frames = _streams(path)
        path.unlink()
        return frames


def _streams(path: Path) -> list[pl.DataFrame]:
    """The frames of a file of Arrow IPC streams, one after another."""
    import pyarrow as pa

    frames, size = [], path.stat().st_size
    with pa.OSFile(str(path)) as file:
        while file.tell() < size:
            frames.append(pl.DataFrame(pa.ipc.open_stream(file).read_all()))
    return frames

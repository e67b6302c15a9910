"""Durable files and file names."""

import os
from pathlib import Path

__all__ = ["append_line", "sync"]


def append_line(path: Path, line: str) -> None:
    """Appends a line, and first ends one that a kill or a full disk cut off, which readers skip. Raises OSError."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")


def sync(path: Path) -> None:
    """Makes the content of a file durable; of a folder, the creation, renaming and deletion of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

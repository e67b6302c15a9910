"""Durable files and file names, files of JSON lines that survive a kill, and hashes."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["JsonObject", "append_line", "json_lines", "sha256_of", "sync"]

JsonObject = dict[str, Any]
"""An object of JSON whose members others define: in a file, a message or an answer, as it stands there."""


def append_line(path: Path, line: str) -> None:
    """Appends a line, and first ends one that a kill or a full disk cut off, which readers skip. Raises OSError."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")


def json_lines(path: Path) -> list[JsonObject]:
    """The objects of a file with one per line; empty if it is missing. A line that is not complete is skipped."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def sha256_of(path: Path) -> str:
    """The hash of a file, in hex; reads it in parts. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Makes the content of a file durable; of a folder, the creation, renaming and deletion of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

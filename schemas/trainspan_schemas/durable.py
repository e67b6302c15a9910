"""Durable files and file names."""

import os
from pathlib import Path

__all__ = ["sync"]


def sync(path: Path) -> None:
    """Makes the content of a file durable; of a folder, the creation, renaming and deletion of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Locks on files (`flock`): the kernel releases them with the process that holds them, however it ends.

All functions raise OSError on a file system without locks.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

__all__ = ["is_locked", "locked", "open_locked", "try_lock"]

_PAUSE_S = 0.01


class _File(Protocol):
    def fileno(self) -> int: ...


def try_lock(file: int | _File, *, shared: bool = False, wait_s: float = 0.0) -> bool:
    """Locks an open file until it is closed; returns False if another process holds it for longer than `wait_s`.

    A process that calls `is_locked` holds the lock for an instant.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def open_locked(path: Path, *, wait_s: float = 0.0) -> int | None:
    """Opens a file, created with mode 0600 if it is missing, and locks it until it is closed; None as `try_lock`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if try_lock(descriptor, wait_s=wait_s):
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock exclusively."""
    with path.open() as file:
        return not try_lock(file, shared=True)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[int]:
    """Waits for the lock on a file, created if it is missing, or on a folder; yields the descriptor."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)

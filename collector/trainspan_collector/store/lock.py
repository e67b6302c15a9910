"""The lock on a store, and who holds it."""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from trainspan_schemas.errors import StoreLockedError
from trainspan_schemas.store.access import lock_file

__all__ = ["StoreLock"]


_LOOK_S: Final = 0.5
"""A reader that waits for a collector to end holds the lock for an instant to check whether it has."""


class StoreLock:
    """The right to write a store, held until `release` or process exit.

    Raises StoreLockedError naming the holder.
    """

    def __init__(self, store: Path) -> None:
        self._file = os.open(lock_file(store), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock()
        except BlockingIOError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise StoreLockedError(
                f"{store} is in use by the collector with pid {holder}: stop that one, or give this one another --store"
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _lock(self) -> None:
        deadline = time.monotonic() + _LOOK_S
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.01)

    def release(self) -> None:
        os.close(self._file)

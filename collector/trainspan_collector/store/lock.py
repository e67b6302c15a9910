"""The lock on a store, and who holds it."""

import os
from pathlib import Path
from typing import Final

from trainspan_schemas.errors import StoreLockedError
from trainspan_schemas.files.locks import try_lock
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
        if not try_lock(self._file, wait_s=_LOOK_S):
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise StoreLockedError(
                f"{store} is in use by the collector with pid {holder}: stop that one, or give this one another --store"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)

"""Who holds what: the lock on a store, and the process behind a taken port."""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from trainspan_schemas.errors import StoreLockedError
from trainspan_schemas.store import lock_file

__all__ = ["StoreLock", "port_holder"]


_LOOK_S: Final = 0.5
"""A reader that waits for a collector's end holds the lock for an instant to see whether it has ended."""


class StoreLock:
    """The right to write a store, held until `release` or the process's end.

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
                f"{store} belongs to the collector with pid {holder}: stop that one, or give this one another --store"
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


def port_holder(port: int) -> str:
    """The process that listens on a TCP port of this machine, as far as this user may see it."""
    inodes = _listening_inodes(port)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
            if links & inodes:
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # ended meanwhile, or another user's
            continue
    return "another process"


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            local_address, state, inode = fields[1], fields[3], fields[9]
            if state == "0A" and int(local_address.rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{inode}]")
    return inodes

"""Admission from the receiver to the journal: a pace and a floor of free disk space, each with a bounded wait."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.frames import Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.trust import Sender
from trainspan_collector.runtime.metrics import RefusalReason

__all__ = ["Admission", "OverloadError"]

_DISK_CHECK_S = 0.5


class OverloadError(Exception):
    """There was no room for a request in time; the sender may retry after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float, reason: RefusalReason) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class Admission:
    """Writes requests to disk: `keep`. Thread-safe."""

    def __init__(
        self, journal: Journal, folder: Path, *, min_free_disk_bytes: int, wait_s: float, backlog: Backlog | None = None
    ) -> None:
        """`backlog` determines when senders are slowed."""
        self._journal = journal
        self._backlog = backlog
        self._folder = folder
        self._min_free_disk_bytes = min_free_disk_bytes
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._disk_checked = 0.0
        self._free_disk_bytes = 0

    @property
    def free_disk_bytes(self) -> int:
        """As of the last check."""
        return self._free_disk_bytes

    def keep(self, signal: Signal, bodies: Sequence[bytes], sender: Sender = Sender.RUNNER) -> None:
        """Returns once all are on disk. Raises OverloadError if disk space is short, StoreError if writing fails."""
        self._wait_for_disk()
        n_bytes = sum(map(len, bodies))
        self._wait_for_turn(n_bytes, untrusted=sender is Sender.AGENT)
        with self._lock:  # until the next check: a fast sender uses much in between
            self._free_disk_bytes = max(0, self._free_disk_bytes - n_bytes)
        self._journal.append_all(signal, bodies, time.time_ns(), sender)

    def _wait_for_disk(self) -> None:
        deadline = time.monotonic() + self._wait_s
        while not self.disk_has_room():
            if time.monotonic() >= deadline:
                raise OverloadError(
                    f"{self._free_disk_bytes} bytes of disk are free at {self._folder}, but "
                    f"the floor is {self._min_free_disk_bytes}: free some, or lower min_free_disk_bytes",
                    10.0,
                    RefusalReason.DISK_FULL,
                )
            time.sleep(min(_DISK_CHECK_S, max(0.0, deadline - time.monotonic())))

    def _wait_for_turn(self, n_bytes: int, *, untrusted: bool) -> None:
        """Waits, so that the journal does not grow to the floor while loading is slower than the senders."""
        if self._backlog is None:
            return
        room_bytes = max(0, self._free_disk_bytes - self._min_free_disk_bytes)
        wait_s = self._backlog.turn(n_bytes, room_bytes, self._wait_s, untrusted=untrusted)
        if wait_s > self._wait_s:
            raise OverloadError(
                f"requests arrive faster than they are loaded, and {room_bytes} bytes of disk are left for waiting ones: "
                "send less, or give the store more disk",
                wait_s,
                RefusalReason.BEHIND,
            )
        if wait_s:
            time.sleep(wait_s)

    def disk_has_room(self) -> bool:
        """Whether more than the floor is free; checked at most twice a second."""
        now = time.monotonic()
        if now - self._disk_checked >= _DISK_CHECK_S:
            stat = os.statvfs(self._folder)
            self._free_disk_bytes = stat.f_bavail * stat.f_frsize
            self._disk_checked = now
        return self._free_disk_bytes >= self._min_free_disk_bytes

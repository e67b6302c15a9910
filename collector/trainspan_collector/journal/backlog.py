"""The backlog: what is acknowledged but not loaded, how long loading it will take, and how fast more may arrive."""

import math
import threading
import time
from collections.abc import Callable
from typing import Final

from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import Position

__all__ = ["Backlog"]

_LOOK_S: Final = 0.25
_MEMORY_S: Final = 15.0
"""Time constant of the rate: longer than a checkpoint, shorter than a disk takes to fill."""
_SLOW_FROM: Final = 0.5
"""Share of the room for the backlog that is in use when senders begin to be slowed."""
_NONE_FROM: Final = {True: 0.625, False: 0.75}
"""Share at which agents (True) and all others (False) are refused: agents that send too fast leave room for the policy server
and the runner. The rest is for what loading needs before it frees what it has loaded."""

_COME_BACK_S: Final = 1.0
_LONGEST_TURN_S: Final = 5.0


class Backlog:
    """Thread-safe. `loaded_to` returns how far the journal is loaded."""

    def __init__(
        self,
        journal: Journal,
        loaded_to: Callable[[], Position],
        *,
        least_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A backlog below `least_bytes` is normal and slows nobody."""
        self._journal = journal
        self._loaded_to = loaded_to
        self._least_bytes = least_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._n_bytes = journal.bytes_after(loaded_to())
        self._n_loaded = journal.n_appended - self._n_bytes
        self._looked = clock()
        self._bytes_per_s: float | None = None
        self._next_turn = {True: 0.0, False: 0.0}
        """For agents (True) and for all others (False): nobody else waits for an agent's turn."""

    def seconds(self) -> float | None:
        """How long loading the backlog will take, at the rate of the last seconds in which there was something to load.

        None if nothing has been loaded yet.
        """
        with self._lock:
            self._measure()
            n_bytes = self._journal.bytes_after(self._loaded_to())
            if not n_bytes:
                return 0.0
            return n_bytes / self._bytes_per_s if self._bytes_per_s else None

    def turn(self, n_bytes: int, room_bytes: int, limit_s: float, *, untrusted: bool = False) -> float:
        """Seconds until `n_bytes` more may be kept; takes the turn if that is at most `limit_s`.

        `room_bytes` is the disk space left for the journal. Nobody waits while the backlog is less than half of that space and
        its own size together. From there on, the pace falls from twice the loading rate to zero, at five eighths for agents
        (`untrusted`) and at three quarters for others.
        """
        with self._lock:
            self._measure()
            taken = self._n_bytes / max(1, self._n_bytes + room_bytes)
            first, last = _SLOW_FROM, _NONE_FROM[untrusted]
            if self._n_bytes < self._least_bytes or taken < first or self._bytes_per_s is None:
                return 0.0
            if taken >= last:
                return limit_s + _COME_BACK_S
            pace = max(1.0, self._bytes_per_s * 2 * (last - taken) / (last - first))
            now = self._clock()
            start = max(now, self._next_turn[untrusted])
            if start - now <= limit_s:
                # Bounded: the pace may be close to zero now, but recover soon.
                self._next_turn[untrusted] = start + min(n_bytes / pace, _LONGEST_TURN_S)
            return start - now

    def _measure(self) -> None:
        now = self._clock()
        passed_s = now - self._looked
        if passed_s < _LOOK_S:
            return
        waited, self._n_bytes = self._n_bytes, self._journal.bytes_after(self._loaded_to())
        before, self._n_loaded = self._n_loaded, self._journal.n_appended - self._n_bytes
        self._looked = now
        if not waited:
            return
        rate = max(0, self._n_loaded - before) / passed_s
        if self._bytes_per_s is None:
            self._bytes_per_s = rate or None
        else:
            weight = math.exp(-passed_s / _MEMORY_S)
            self._bytes_per_s = weight * self._bytes_per_s + (1 - weight) * rate

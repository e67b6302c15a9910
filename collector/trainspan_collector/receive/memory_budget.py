"""The memory that requests may take: one budget for all listeners."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from trainspan_collector.receive.admission import OverloadError
from trainspan_collector.runtime.metrics import RefusalReason
from trainspan_schemas.store.roles import Role

__all__ = ["MemoryBudget", "Share"]

_AGENTS: Final = (Role.AGENT, Role.USER)
_AGENTS_PART: Final = 0.75
"""Fraction of the budget: slow agents never take what the policy server and the runner need."""


class MemoryBudget:
    """Bytes in memory. Thread-safe."""

    def __init__(self, max_bytes: int, wait_s: float) -> None:
        self.max_bytes = max_bytes
        self.wait_s = wait_s
        self._n_bytes = 0
        self._changed = threading.Condition()

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    @contextlib.contextmanager
    def share(self, role: Role, n_bytes: int = 0) -> Iterator["Share"]:
        """What one request holds, released at the end of the block. Raises OverloadError if there is no room in time."""
        share = Share(self, int(self.max_bytes * _AGENTS_PART) if role in _AGENTS else self.max_bytes)
        try:
            if n_bytes:
                share.grow(n_bytes)
            yield share
        finally:
            share.give_back()


class Share:
    """One request's share. The only request in memory may exceed the budget, however large it is."""

    def __init__(self, budget: MemoryBudget, most: int) -> None:
        self._budget = budget
        self._most = most
        self.n_bytes = 0

    @property
    def wait_s(self) -> float:
        """How long to wait for room."""
        return self._budget.wait_s

    def grow(self, n_bytes: int) -> None:
        """Waits for room. Raises OverloadError if there is none in time."""
        budget = self._budget
        with budget._changed:
            if not budget._changed.wait_for(lambda: self._fits(n_bytes), budget.wait_s):
                raise self.overload()
            self._take(n_bytes)

    def try_to_grow(self, n_bytes: int) -> bool:
        """Like `grow`, without waiting; returns whether there was room."""
        with self._budget._changed:
            fits = self._fits(n_bytes)
            if fits:
                self._take(n_bytes)
            return fits

    def overload(self) -> OverloadError:
        budget = self._budget
        message = f"{budget.n_bytes} bytes of requests are in memory, the limit is {self._most}"
        return OverloadError(message, budget.wait_s, RefusalReason.MEMORY)

    def give_back(self) -> None:
        with self._budget._changed:
            self._budget._n_bytes -= self.n_bytes
            self.n_bytes = 0
            self._budget._changed.notify_all()

    def _fits(self, n_bytes: int) -> bool:
        total = self._budget._n_bytes
        return total == self.n_bytes or total + n_bytes <= self._most

    def _take(self, n_bytes: int) -> None:
        self._budget._n_bytes += n_bytes
        self.n_bytes += n_bytes

"""The gate before generation: requests pass, or are held while the weights change."""

import asyncio
import time

__all__ = ["Gate"]


class Gate:
    """Counts requests under way; closed, it holds new ones. For one event loop."""

    def __init__(self) -> None:
        self._opened, self._idle = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._idle.set()
        self._in_flight = 0
        self.refused = 0
        """Requests that it stayed closed for too long for."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def enter(self, timeout_s: float) -> bool:
        """Waits until the gate is open, then counts the request; False where it stayed closed for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_open:
            try:
                await asyncio.wait_for(self._opened.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self.refused += 1
                return False
        self._in_flight += 1
        self._idle.clear()
        return True

    def leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def close(self, drain_s: float) -> bool:
        """Holds new requests and waits for those under way; False (and still closed) if they outlast `drain_s`."""
        self._opened.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except TimeoutError:
            return False
        return True

    def open(self) -> None:
        self._opened.set()

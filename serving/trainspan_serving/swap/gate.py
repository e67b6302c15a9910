"""The gate in front of generation: requests pass, or are held while the weights change."""

import asyncio
import time

__all__ = ["Gate", "Pass"]


class Pass:
    """The token of a request that is inside the gate."""

    __slots__ = ()


class Gate:
    """Counts requests in flight; while closed, it holds new ones. For one event loop."""

    def __init__(self) -> None:
        self._opened, self._idle = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._idle.set()
        self._inside: set[Pass] = set()
        self.refused = 0
        """Requests refused because the gate stayed closed for too long."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    async def enter(self, timeout_s: float) -> Pass | None:
        """Waits for the gate to open, then counts the request until `leave`; None if that takes over `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_open:
            try:
                await asyncio.wait_for(self._opened.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self.refused += 1
                return None
        entered = Pass()
        self._inside.add(entered)
        self._idle.clear()
        return entered

    def leave(self, entered: Pass) -> None:
        """Marks the request as ended; does nothing if it was forgotten already."""
        self._inside.discard(entered)
        if not self._inside:
            self._idle.set()

    def forget(self) -> None:
        """Forgets all requests in flight: they can no longer reach the engine."""
        self._inside.clear()
        self._idle.set()

    def hold(self) -> None:
        """Holds new requests, whatever those in flight do."""
        self._opened.clear()

    async def close(self, drain_s: float) -> bool:
        """Holds new requests and waits for those in flight; False (and still closed) if they outlast `drain_s`."""
        self.hold()
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except TimeoutError:
            return False
        return True

    def open(self) -> None:
        self._opened.set()

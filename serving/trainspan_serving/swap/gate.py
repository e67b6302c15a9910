"""The gate before generation: requests pass, or are held while the weights change."""

import asyncio
import time

__all__ = ["Gate", "Pass"]


class Pass:
    """What a request holds that went through the gate."""

    __slots__ = ()


class Gate:
    """Counts requests under way; closed, it holds new ones. For one event loop."""

    def __init__(self) -> None:
        self._opened, self._idle = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._idle.set()
        self._inside: set[Pass] = set()
        self.refused = 0
        """Requests that it stayed closed for too long for."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    async def enter(self, timeout_s: float) -> Pass | None:
        """Waits until the gate is open, then counts the request until `leave`; None if it stayed closed for `timeout_s`."""
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
        """The request has ended; one that was forgotten already is none of the gate's business."""
        self._inside.discard(entered)
        if not self._inside:
            self._idle.set()

    def forget(self) -> None:
        """Counts nobody any more: what is still under way has been kept from the engine."""
        self._inside.clear()
        self._idle.set()

    async def close(self, drain_s: float) -> bool:
        """Holds new requests and waits for those under way; False (and still closed) if they outlast `drain_s`."""
        self._opened.clear()
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), drain_s)
        except TimeoutError:
            return False
        return True

    def open(self) -> None:
        self._opened.set()

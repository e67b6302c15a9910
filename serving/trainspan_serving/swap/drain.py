"""Gets the engine ready for a change of its weights: drains it of requests, or freezes them where they are.

A drain holds new requests, waits for those in flight, then ends them. A freeze holds new requests, too, and stops those in
flight after their current token; they go on once the engine is resumed, with the new weights.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.gate import Gate

__all__ = ["Drain", "Freeze"]

_log = logging.getLogger(__name__)

_LEAST_PAUSE_S = 1.0
"""Minimum time for the engine to finish requests that bypass our gate, even if the gate used up the whole limit."""
_PATIENCE_S = 1.0
"""How long a request of the server's own waits for the engine before running requests make room for it."""


class Drain:
    """One drain of at most `limit_s`; requests that outlast it are ended, and their clients get the reason `why`."""

    def __init__(self, gate: Gate, tap: EngineTap, engine: Engine, limit_s: float, why: str) -> None:
        self._gate, self._tap, self._engine = gate, tap, engine
        self._limit_s, self._why = limit_s, why
        self._deadline = time.monotonic() + limit_s

    async def close_gate(self) -> None:
        """Closes the gate, which then holds new requests, and waits for the requests inside."""
        if not await self._gate.close(self._left_s()):
            await self._end_all()
            self._gate.forget()
            await self._engine.resume()

    async def pause_engine(self) -> None:
        """Waits for requests that bypassed the gate; afterwards the engine is idle until it is resumed."""
        if not await self._engine.pause(max(_LEAST_PAUSE_S, self._left_s())):
            await self._end_all()

    async def pause_after(self, warm_up: Callable[[], Awaitable[None]]) -> None:
        """Closes the gate, runs `warm_up` in the idle engine, and pauses it."""
        await self.close_gate()
        await warm_up()
        await self.pause_engine()

    async def pause_again(self) -> None:
        """Pauses the engine once more, in which only requests of the server itself can run: they are aborted."""
        await self._engine.abort()

    async def _end_all(self) -> None:
        message = (
            f"the policy server ended this request after waiting {self._limit_s:g} s for it, because {self._why}; "
            "send it again"
        )
        self._tap.end_all(message)
        await self._engine.abort()
        _log.warning("requests ended after_s=%g in_flight=%d: %s", self._limit_s, self._gate.in_flight, self._why)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


class Freeze:
    """One freeze; `limit_s` is only a limit for the engine to finish its current step."""

    def __init__(self, gate: Gate, engine: Engine, limit_s: float) -> None:
        self._gate, self._engine, self._limit_s = gate, engine, limit_s

    async def pause_after(self, warm_up: Callable[[], Awaitable[None]]) -> None:
        """Runs `warm_up` among the requests, closes the gate, and stops those inside after their current token.

        In a full engine `warm_up` is computed at once, too: a freeze puts the running requests back into the queue, in which
        the server's own come first. Raises TimeoutError, and resumes all, if the engine does not stop.
        """
        warming = asyncio.ensure_future(warm_up())
        try:
            await asyncio.wait([warming], timeout=_PATIENCE_S)
            if not warming.done():
                await self.pause_again()
                await self._engine.resume()
            await warming
        finally:
            warming.cancel()
        self._gate.hold()
        await self.pause_again()

    async def pause_again(self) -> None:
        """Stops all requests after their current token. Raises TimeoutError, and resumes them, if the engine does not stop."""
        await self._engine.freeze(max(_LEAST_PAUSE_S, self._limit_s))
        _log.info("requests frozen in_flight=%d", self._gate.in_flight)

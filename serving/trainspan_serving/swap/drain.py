"""Gets the engine ready for a change of its weights: drains it of requests, or freezes them where they are.

A drain holds new requests, waits for those in flight, then ends them. A freeze holds new requests, too, and stops those in
flight after their current token; they go on once the engine is resumed, with the new weights.
"""

import logging
import time

from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.gate import Gate

__all__ = ["Drain", "Freeze"]

_log = logging.getLogger(__name__)

_LEAST_PAUSE_S = 1.0
"""Minimum time for the engine to finish requests that bypass our gate, even if the gate used up the whole limit."""


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

    async def close_gate(self) -> None:
        """Closes the gate, which then holds new requests; those inside go on."""
        self._gate.hold()

    async def pause_engine(self) -> None:
        """Stops all requests after their current token. Raises TimeoutError, and resumes them, if the engine does not stop."""
        await self._engine.freeze(max(_LEAST_PAUSE_S, self._limit_s))
        _log.info("requests frozen in_flight=%d", self._gate.in_flight)

    async def pause_again(self) -> None:
        """Stops them again, with other weights in the engine."""
        await self.pause_engine()

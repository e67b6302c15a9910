"""How the engine is emptied before its weights change: new requests are held, and those under way end or are ended."""

import logging
import time

from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.gate import Gate

__all__ = ["Drain"]

_log = logging.getLogger(__name__)

_LEAST_PAUSE_S = 1.0
"""What the engine is given to finish what our gate does not know of, even if the gate has taken all of the time."""


class Drain:
    """One emptying, within `limit_s`; what outlives it is ended, and clients are told that it is because `why`."""

    def __init__(self, gate: Gate, tap: EngineTap, engine: Engine, limit_s: float, why: str) -> None:
        self._gate, self._tap, self._engine = gate, tap, engine
        self._limit_s, self._why = limit_s, why
        self._deadline = time.monotonic() + limit_s

    async def close_gate(self) -> None:
        """Holds what comes through the gate, which stays closed, and waits for what went through it."""
        if not await self._gate.close(self._left_s()):
            await self._end_all()
            self._gate.forget()
            await self._engine.resume()

    async def pause_engine(self) -> None:
        """Waits for what did not come through the gate; the engine is empty then, and begins nothing until it goes on."""
        if not await self._engine.pause(max(_LEAST_PAUSE_S, self._left_s())):
            await self._end_all()

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

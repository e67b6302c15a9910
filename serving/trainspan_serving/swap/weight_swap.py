"""Replaces the full weights in the engine, while nothing runs or in the middle of generations that are frozen meanwhile.

An adapter that is merged replaces them too.
"""

from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.checkpoints.candidates import CheckpointCandidate
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.swap.canary import cache_prompt, prime
from trainspan_serving.swap.drain import Drain, Freeze
from trainspan_serving.swap.engine import Engine

__all__ = ["RollbackFailedError", "WeightSwap"]


class RollbackFailedError(Exception):
    """The engine could not load the earlier weights again: it serves no known policy."""


class WeightSwap:
    """One swap of full weights: prepare, load, then commit or undo. After `undo`, `earlier` is in the engine."""

    def __init__(
        self,
        engine: Engine,
        tap: EngineTap,
        pause: Drain | Freeze,
        candidate: CheckpointCandidate,
        earlier: ServedPolicy,
    ) -> None:
        self._engine, self._tap, self._pause = engine, tap, pause
        self._candidate, self._earlier = candidate, earlier

    async def prepare(self) -> None:
        """Pauses the engine, and primes the prefix cache before so that the canary would notice if it were kept."""
        await self._pause.pause_after(self._warm_up)

    async def _warm_up(self) -> None:
        await self._engine.wake()
        if self._candidate.canary:
            await prime(self._tap, cache_prompt(self._candidate.canary, self._engine), self._earlier)

    async def load(self) -> ServedPolicy:
        """Loads the candidate; the engine stays paused. Raises what vLLM raises."""
        candidate, earlier = self._candidate, self._earlier
        if candidate.weights is None:
            policy = ServedPolicy(
                earlier.name,
                candidate.version,
                earlier.weights,
                merged=candidate.folder,
                base=earlier.base,
                weights_sha256=candidate.weights_sha256,
            )
        else:
            policy = ServedPolicy(
                earlier.name,
                candidate.version,
                candidate.folder,
                base=candidate.base,
                weights_sha256=candidate.weights_sha256,
            )
        await self._engine.load(policy)
        return policy

    async def commit(self) -> None:
        """Removes the earlier adapter, which was trained on the earlier weights."""
        if self._earlier.adapter:
            await self._engine.remove_adapter(self._earlier.adapter)

    async def undo(self) -> None:
        """Loads the earlier weights again. Raises RollbackFailedError if that fails too."""
        try:
            await self._pause.pause_again()
            await self._engine.load(self._earlier)
            await self._engine.resume()
        except Exception as error:
            raise RollbackFailedError(f"cannot load version {self._earlier.version} again") from error

"""Loads an adapter next to the one in service, which keeps serving until the canary passes."""

from trainspan_serving.checkpoints.candidates import CheckpointCandidate
from trainspan_serving.checkpoints.served_policy import Adapter, ServedPolicy
from trainspan_serving.swap.engine import Engine

__all__ = ["AdapterSwap"]


class AdapterSwap:
    """One swap of adapters: prepare, load, then commit or undo."""

    def __init__(self, engine: Engine, candidate: CheckpointCandidate, earlier: ServedPolicy) -> None:
        self._engine, self._candidate, self._earlier = engine, candidate, earlier
        self._adapter: Adapter | None = None

    async def prepare(self) -> None:
        """Does nothing: requests keep running while the adapter is loaded."""

    async def load(self) -> ServedPolicy:
        """Loads the candidate. Raises what vLLM raises."""
        version, earlier = self._candidate.version, self._earlier
        self._adapter = await self._engine.add_adapter(self._candidate.folder, version, earlier.name)
        return ServedPolicy(
            earlier.name,
            version,
            earlier.weights,
            self._adapter,
            base=earlier.base,
            weights_sha256=self._candidate.weights_sha256,
        )

    async def commit(self) -> None:
        """Does nothing: the earlier adapter stays loaded for the requests that still use it."""

    async def undo(self) -> None:
        """Removes the adapter if it was loaded."""
        if self._adapter:
            await self._engine.remove_adapter(self._adapter)

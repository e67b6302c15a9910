"""Verifies that the engine computes with a checkpoint: its log-probabilities, its prefix cache and its kernels."""

import asyncio
import logging

from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.checkpoints.candidates import CheckpointCandidate
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.swap.canary import ABSENT, CanaryReport, Loaded, cache_prompt, judge, read_through_cache, score
from trainspan_serving.swap.engine import Engine

__all__ = ["Verifier"]

_log = logging.getLogger(__name__)

_QUEUEING_S = 0.05
"""Time for the canary's requests to reach a paused engine, in which they go before all that wait."""


class Verifier:
    """Judges candidates that the engine has loaded; `tolerance` is that of `canary.judge`."""

    def __init__(self, engine: Engine, tap: EngineTap, tolerance: float | None) -> None:
        self._engine, self._tap, self._tolerance = engine, tap, tolerance
        self._unreadable: frozenset[str] | None = None
        """Tensors that read differently from the file right after vLLM loaded it; None: nothing can be read."""

    async def calibrate(self, policy: ServedPolicy) -> None:
        """Finds the tensors that cannot be compared, given that the engine computes with the policy's full weights."""
        if verdicts := await self._engine.compare(policy):
            self._unreadable = frozenset([*verdicts["differing"], *verdicts["unknown"]])
            _log.info("weights tensors=%d unreadable=%d", sum(map(len, verdicts.values())), len(self._unreadable))

    async def verify(self, candidate: CheckpointCandidate, policy: ServedPolicy) -> CanaryReport:
        """Resumes the engine, and returns the verdict on a candidate that it has loaded as `policy`."""
        if candidate.canary is None:
            await self._engine.resume()
            _log.warning("no canary checkpoint=%s: cannot verify that its weights are served", candidate.folder.name)
            return ABSENT
        prompt = cache_prompt(candidate.canary, self._engine)
        asked = asyncio.gather(
            read_through_cache(self._tap, prompt, policy), score(self._tap, candidate.canary, policy)
        )
        await asyncio.sleep(_QUEUEING_S)
        await self._engine.resume()
        cached, scores = await asked
        loaded = await self._loaded(policy)
        return judge(candidate.canary, scores, cached, loaded, tolerance=self._tolerance, dtype=self._engine.dtype)

    async def _loaded(self, policy: ServedPolicy) -> Loaded | None:
        """Returns which of the policy's tensors the engine computes with; None if nothing can be read."""
        if policy.adapter:
            verdicts, unreadable = await self._engine.compare_adapter(policy.adapter), frozenset[str]()
        elif self._unreadable is None:
            return None
        else:
            verdicts, unreadable = await self._engine.compare(policy), self._unreadable
        if verdicts is None:
            return None
        equal, differing = (set(verdicts[name]) - unreadable for name in ("equal", "differing"))
        unknown = sum(map(len, verdicts.values())) - len(equal) - len(differing)
        return Loaded(len(equal), tuple(sorted(differing)), unknown)

"""The policy in service, and its swap for another: validate, load, check with the canary, or roll back."""

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.checkpoint import base_digest
from trainspan_schemas.errors import CheckpointError, one_line
from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.checkpoints.candidates import Candidate, find_candidate
from trainspan_serving.checkpoints.served_policy import Adapter, Policy
from trainspan_serving.checkpoints.weights import Weights, read_weights
from trainspan_serving.process.link import report
from trainspan_serving.process.server_plan import ServerPlan
from trainspan_serving.swap.canary import ABSENT, CanaryReport, Loaded, judge, prime, read_through_cache, score
from trainspan_serving.swap.drain import Drain
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.gate import Gate

__all__ = ["BusyError", "CanaryFailedError", "LoadFailedError", "PolicyServer", "SwapResult"]

_log = logging.getLogger(__name__)


class CanaryFailedError(CheckpointError):
    """The engine did not compute with the checkpoint after loading it: the earlier policy is in service."""

    def __init__(self, message: str, canary: CanaryReport) -> None:
        super().__init__(message)
        self.canary = canary


class LoadFailedError(Exception):
    """The engine could not load a fitting checkpoint: the earlier policy is in service."""


class BusyError(Exception):
    """Another change is in progress: the request was not processed."""


@dataclass(frozen=True, slots=True)
class SwapResult:
    """The result of a successful swap."""

    version: int
    checkpoint: str
    canary: CanaryReport
    seconds: dict[str, float]


class PolicyServer:
    """Owns the gate and swaps the weights, one change at a time."""

    def __init__(self, plan: ServerPlan, engine: Engine, tap: EngineTap, policy: Policy, served: Weights) -> None:
        self.gate = Gate()
        self.policy = policy
        self.plan = plan
        self.canary: CanaryReport | None = None
        self.swaps: Counter[str] = Counter()
        """Outcome (a canary status, `undone`, `failed`, `refused` or `busy`) → count."""
        self.swap_seconds = 0.0
        """Total of all successful swaps."""
        self.asleep = False
        self._engine, self._tap = engine, tap
        self._served = served
        self._unreadable: frozenset[str] | None = None
        """Tensors that read differently from the file right after vLLM loaded it; None: nothing can be read."""
        self._changing = asyncio.Lock()
        self._broken = False

    @classmethod
    async def start(cls, plan: ServerPlan, engine: Engine, tap: EngineTap) -> "PolicyServer":
        """Labels the engine's weights with their version, and loads the plan's adapter."""
        folder = await asyncio.to_thread(_local_folder, plan.model)
        served = await asyncio.to_thread(read_weights, folder)
        base = await asyncio.to_thread(base_digest, folder)
        await engine.label(plan.version)
        adapter = None
        if plan.adapter:
            adapter = await engine.add_adapter(Path(plan.adapter), plan.version, plan.served_name)
        server = cls(plan, engine, tap, Policy(plan.version, folder, adapter, base), served)
        if verdicts := await engine.compare(folder, plan.version):
            server._unreadable = frozenset([*verdicts["differing"], *verdicts["unknown"]])
            _log.info("weights tensors=%d unreadable=%d", len(served.tensors), len(server._unreadable))
        return server

    @property
    def dtype(self) -> str:
        """The dtype of the computation, e.g. "float32"."""
        return self._engine.dtype

    @property
    def requests_ended(self) -> int:
        """Requests ended because they outlasted the drain timeout of a swap or a sleep request."""
        return self._tap.cut_requests

    async def swap(self, checkpoint: str, version: int) -> SwapResult:
        """Serves `checkpoint` (a name under `--checkpoints`) as `version`.

        Raises CheckpointError if it does not fit, BusyError during another change (nothing was touched), and
        CanaryFailedError or LoadFailedError if the earlier policy was restored.
        """
        seconds: dict[str, float] = {}
        try:
            async with self._alone():
                with _timed(seconds, "total"):
                    with _timed(seconds, "validate"):
                        candidate = await asyncio.to_thread(self._validate, checkpoint, version)
                    exchange = self._exchange_adapter if candidate.weights is None else self._exchange_weights
                    canary = await exchange(candidate, seconds)
        except (CheckpointError, LoadFailedError, BusyError) as error:
            self.swaps[_outcome_of(error)] += 1
            raise
        self.canary = canary
        self.swaps[canary.status] += 1
        self.swap_seconds += seconds["total"]
        adapter = str(self.policy.adapter.folder) if self.policy.adapter else None
        report({"event": "policy", "model": str(self.policy.weights), "adapter": adapter, "version": version})
        _log.info("policy swapped version=%d canary=%s seconds=%.3f", version, canary.status, seconds["total"])
        return SwapResult(version, checkpoint, canary, seconds)

    async def sleep(self) -> None:
        """Holds new requests, waits for those in flight, and frees the accelerator's memory until `wake` or a swap.

        Raises BusyError during another change.
        """
        async with self._alone():
            if self.asleep:
                return
            drain = self._drain("the server is going to sleep")
            try:
                await drain.close_gate()
                await drain.pause_engine()
                await self._engine.sleep()
            except Exception:
                await self._engine.resume()
                self.gate.open()
                raise
            self.asleep = True

    async def wake(self) -> None:
        """Allocates the memory again and lets requests through; does nothing if the server is awake."""
        async with self._alone():
            await self._wake()
            self.gate.open()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Admits one change at a time."""
        if self._broken:
            raise BusyError("the server is restarting; try again")
        if self._changing.locked():
            raise BusyError("another swap, sleep or wake request is in progress; try again")
        async with self._changing:
            yield

    def _validate(self, checkpoint: str, version: int) -> Candidate:
        checkpoints = Path(self.plan.checkpoints)
        candidate = find_candidate(checkpoints, checkpoint, version, self._served, self._engine.limits)
        if candidate.weights and not self._engine.can_reload:
            raise CheckpointError(
                "this server cannot swap full weights: start vLLM with "
                "--worker-extension-cls trainspan_serving.worker.PolicyWorker"
            )
        return candidate

    async def _exchange_adapter(self, candidate: Candidate, seconds: dict[str, float]) -> CanaryReport:
        """Loads the new adapter next to the one in service, which keeps serving until the canary passes."""
        name = candidate.folder.name
        seconds["drain"] = 0.0
        adapter: Adapter | None = None
        try:
            await self._wake()
            with _timed(seconds, "reload"):
                adapter = await self._engine.add_adapter(candidate.folder, candidate.version, self.plan.served_name)
            policy = Policy(candidate.version, self.policy.weights, adapter, self.policy.base)
            with _timed(seconds, "canary"):
                canary = await self._check(candidate, policy)
        except Exception as error:
            await self._discard(adapter)
            raise LoadFailedError(f"loading {name} failed: {one_line(error)}") from error
        finally:
            self.gate.open()
        if canary.status == "stale":
            await self._discard(adapter)
            self._refuse_stale(canary, name)
        self.policy = policy
        return canary

    async def _exchange_weights(self, candidate: Candidate, seconds: dict[str, float]) -> CanaryReport:
        """Replaces the weights while nothing runs, so that no call is answered by two policies."""
        assert candidate.weights is not None
        earlier, name = self.policy, candidate.folder.name
        policy = Policy(candidate.version, candidate.folder, base=candidate.base)
        drain = self._drain(f"version {candidate.version} of the weights is being loaded")
        try:
            with _timed(seconds, "drain"):
                await drain.close_gate()
                await self._wake()
                if candidate.canary:
                    await prime(self._tap, candidate.canary, earlier)
                await drain.pause_engine()
            try:
                with _timed(seconds, "reload"):
                    await self._engine.load(policy)
                with _timed(seconds, "canary"):
                    canary = await self._check(candidate, policy)
            except Exception as error:
                await self._undo(earlier)
                raise LoadFailedError(f"loading {name} failed: {one_line(error)}") from error
            if canary.status == "stale":
                await self._undo(earlier)
                self._refuse_stale(canary, name)
            self.policy, self._served = policy, candidate.weights
            if earlier.adapter:
                await self._discard(earlier.adapter)
            return canary
        finally:
            if not self._broken:
                self.gate.open()

    def _drain(self, why: str) -> Drain:
        return Drain(self.gate, self._tap, self._engine, self.plan.drain_timeout_s, why)

    async def _wake(self) -> None:
        if self.asleep:
            await self._engine.wake()
            self.asleep = False

    async def _check(self, candidate: Candidate, policy: Policy) -> CanaryReport:
        if candidate.canary is None:
            _log.warning("no canary checkpoint=%s: cannot verify that its weights are served", candidate.folder.name)
            return ABSENT
        cached = await read_through_cache(self._tap, candidate.canary, policy)
        scores = await score(self._tap, candidate.canary, policy)
        loaded = await self._loaded(candidate, policy)
        tolerance = self.plan.canary_tolerance
        return judge(candidate.canary, scores, cached, loaded, tolerance=tolerance, dtype=self._engine.dtype)

    async def _loaded(self, candidate: Candidate, policy: Policy) -> Loaded | None:
        """Returns which of the candidate's tensors the engine computes with; None if nothing can be read."""
        if policy.adapter:
            verdicts, unreadable = await self._engine.compare_adapter(policy.adapter), frozenset[str]()
        elif self._unreadable is None:
            return None
        else:
            verdicts, unreadable = await self._engine.compare(candidate.folder, candidate.version), self._unreadable
        if verdicts is None:
            return None
        equal, differing = (set(verdicts[name]) - unreadable for name in ("equal", "differing"))
        unknown = sum(map(len, verdicts.values())) - len(equal) - len(differing)
        return Loaded(len(equal), tuple(sorted(differing)), unknown)

    def _refuse_stale(self, canary: CanaryReport, name: str) -> None:
        self.canary = canary
        what = f"the engine is not serving {name}: {canary.evidence}"
        raise CanaryFailedError(f"{what}; version {self.policy.version} stays in service", canary)

    async def _undo(self, earlier: Policy) -> None:
        """Loads the earlier weights again.

        If that fails too, the gate stays closed and this process ends: its supervisor restarts it with those weights.
        """
        try:
            await self._engine.abort()
            await self._engine.load(earlier)
        except Exception:
            self._broken = True
            _log.exception("rollback failed version=%d: restarting", earlier.version)
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    async def _discard(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            await self._engine.remove_adapter(adapter)


def _outcome_of(error: Exception) -> str:
    """Returns the key under which `PolicyServer.swaps` counts the error."""
    named = {CanaryFailedError: "undone", LoadFailedError: "failed", BusyError: "busy"}
    return named.get(type(error), "refused")


def _local_folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model).resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[step] = round(time.monotonic() - start, 4)

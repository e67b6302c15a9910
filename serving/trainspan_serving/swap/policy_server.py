"""The policies in service, and the swap of one for another: validate, load, verify, then commit or undo."""

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import base_digest
from trainspan_schemas.errors import CheckpointError, one_line
from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.checkpoints.candidates import CheckpointCandidate, find_candidate
from trainspan_serving.checkpoints.merged import check_can_merge
from trainspan_serving.checkpoints.pull import CheckpointSource, prune_pulled
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.checkpoints.weights import Weights, read_weights
from trainspan_serving.process.link import report
from trainspan_serving.process.server_plan import ServerPlan
from trainspan_serving.swap.adapter_swap import AdapterSwap
from trainspan_serving.swap.canary import CanaryReport
from trainspan_serving.swap.drain import Drain, Freeze
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.gate import Gate
from trainspan_serving.swap.policy_table import PolicyRow, PolicyTable
from trainspan_serving.swap.verifier import Verifier
from trainspan_serving.swap.weight_swap import RollbackFailedError, WeightSwap

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

    def __init__(
        self, plan: ServerPlan, engine: Engine, tap: EngineTap, policies: PolicyTable, served: Weights
    ) -> None:
        self.gate = Gate()
        self.policies = policies
        self.plan = plan
        self.started_ns = time.time_ns()
        """Since then the counts of this process are counted."""
        self.swaps: Counter[str] = Counter()
        """Outcome (a canary status, `undone`, `failed`, `refused` or `busy`) → count."""
        self.swap_seconds = 0.0
        """Total of all successful swaps."""
        self._engine, self._tap = engine, tap
        self._verifier = Verifier(engine, tap, plan.canary_tolerance)
        self._served = served
        self.source = CheckpointSource(plan.weights_url, plan.token) if plan.weights_url else None
        """Where checkpoints are copied from; None: they are in the folder."""
        self._copying = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._broken = False

    @classmethod
    async def start(cls, plan: ServerPlan, engine: Engine, tap: EngineTap) -> "PolicyServer":
        """Labels the engine's weights with their version, and loads the plan's adapters."""
        folder = await asyncio.to_thread(_local_folder, plan.model)
        served = await asyncio.to_thread(read_weights, folder)
        base = await asyncio.to_thread(base_digest, folder)
        await engine.label(plan.version)
        adapter = None
        merged = Path(plan.adapter) if plan.adapter and plan.merge_adapters else None
        if plan.adapter and not merged:
            adapter = await engine.add_adapter(Path(plan.adapter), plan.version, plan.served_name)
        named = {}
        for name, own in plan.policies.items():
            loaded = await engine.add_adapter(Path(own.adapter), own.version, name) if own.adapter else None
            named[name] = ServedPolicy(name, own.version, folder, loaded, base=base)
        agents = {agent: name for name, own in plan.policies.items() for agent in own.agents}
        first = ServedPolicy(plan.served_name, plan.version, folder, adapter, merged, base)
        server = cls(plan, engine, tap, PolicyTable(first, named, agents), served)
        await server._verifier.calibrate(replace(first, merged=None))
        if merged:
            await asyncio.to_thread(check_can_merge, merged, served)
            await engine.load(first)
        return server

    @property
    def policy(self) -> ServedPolicy:
        """The policy that answers calls of no other one."""
        return self.policies.base.policy

    @property
    def canary(self) -> CanaryReport | None:
        """Its last canary."""
        return self.policies.base.canary

    @property
    def asleep(self) -> bool:
        """Whether the accelerator's memory is freed; requests are held."""
        return self._engine.asleep

    @property
    def is_changing(self) -> bool:
        """Whether a swap, sleep or wake request is in progress."""
        return self._changing.locked()

    @property
    def dtype(self) -> str:
        """The dtype of the computation, e.g. "float32"."""
        return self._engine.dtype

    @property
    def requests_ended(self) -> int:
        """Requests ended because they outlasted the drain timeout of a swap or a sleep request."""
        return self._tap.cut_requests

    @property
    def internal_requests(self) -> int:
        """Requests to the engine that the server itself has made, which vLLM's metrics count too."""
        return self._tap.internal_requests

    @property
    def forced_requests(self) -> int:
        """Generations that were answered with stored tokens, which vLLM's metrics do not count."""
        return self._tap.forced_requests

    async def swap(self, checkpoint: str, version: int, policy: str | None = None) -> SwapResult:
        """Serves `checkpoint` (a name under `--checkpoints`, in the policy's folder) as `version` of `policy`.

        Raises CheckpointError if it does not fit, BusyError during another change (nothing was touched), and
        CanaryFailedError or LoadFailedError if the earlier policy was restored.
        """
        seconds: dict[str, float] = {}
        try:
            async with self._alone():
                with _timed(seconds, "total"):
                    row = self.policies.row(policy)
                    with _timed(seconds, "validate"):
                        candidate = await self._staged(checkpoint, version, policy)
                    canary = await self._exchange(row, candidate, seconds)
        except (CheckpointError, LoadFailedError, BusyError) as error:
            self.swaps[_outcome_of(error)] += 1
            raise
        self.swaps[canary.status] += 1
        self.swap_seconds += seconds["total"]
        served, took_s = row.policy, seconds["total"]
        adapter = str(served.adapter_folder) if served.adapter_folder else None
        state = {"model": str(served.weights), "adapter": adapter, "version": version}
        report({"event": "policy", "policy": policy, **state})
        _log.info("policy=%s swapped version=%d canary=%s seconds=%.3f", served.name, version, canary.status, took_s)
        return SwapResult(version, checkpoint, canary, seconds)

    async def stage(self, checkpoint: str, version: int, policy: str | None = None) -> None:
        """Copies a checkpoint from the trainer's machine, if one is set, and validates it, while requests go on.

        Its files are then in the page cache, so that a swap reads no disk. Raises CheckpointError if it does not fit,
        BusyError if the server is restarting.
        """
        if self._broken:
            raise BusyError("the server is restarting; try again")
        self.policies.row(policy)
        await self._staged(checkpoint, version, policy)

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

    async def wake(self) -> None:
        """Allocates the memory again and lets requests through; does nothing if the server is awake."""
        async with self._alone():
            await self._engine.wake()
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

    async def _staged(self, checkpoint: str, version: int, policy: str | None) -> CheckpointCandidate:
        async with self._copying:
            if self.source is not None:
                folder = Path(self.plan.checkpoints, policy or "")
                await asyncio.to_thread(self.source.pull, checkpoint, policy, folder)
            return await asyncio.to_thread(self._validate, checkpoint, version, policy)

    def _validate(self, checkpoint: str, version: int, policy: str | None) -> CheckpointCandidate:
        checkpoints = Path(self.plan.checkpoints, policy or "")
        candidate = find_candidate(checkpoints, checkpoint, version, self._served, self._engine.limits)
        if candidate.weights and policy is not None:
            raise CheckpointError(
                f"{checkpoint} has full weights, but policy {policy!r} is an adapter on the base model"
            )
        is_merged = candidate.weights is None and self._engine.merges_adapters
        if is_merged:
            check_can_merge(candidate.folder, self._served)
        if (candidate.weights or is_merged) and not self._engine.can_reload:
            raise CheckpointError(
                "this server cannot swap full weights: start vLLM with "
                "--worker-extension-cls trainspan_serving.worker.PolicyWorker"
            )
        return candidate

    async def _exchange(
        self, row: PolicyRow, candidate: CheckpointCandidate, seconds: dict[str, float]
    ) -> CanaryReport:
        """Loads and verifies the candidate, then commits it as the row's policy or restores the earlier one.

        If the earlier weights cannot be restored, the gate stays closed and this process ends: its supervisor restarts
        it with those weights.
        """
        name = candidate.folder.name
        swap = self._swap_of(candidate, row.policy)
        try:
            with _timed(seconds, "drain"):
                await self._prepare(swap)
            try:
                await self._engine.wake()
                with _timed(seconds, "reload"):
                    policy = await swap.load()
                with _timed(seconds, "canary"):
                    canary = await self._verifier.verify(candidate, policy)
            except Exception as error:
                await swap.undo()
                raise LoadFailedError(f"loading {name} failed: {one_line(error)}") from error
            if canary.status == "stale":
                await swap.undo()
                row.canary = canary
                what = f"the engine is not serving {name}: {canary.evidence}"
                raise CanaryFailedError(f"{what}; version {row.policy.version} stays in service", canary)
            row.policy, row.canary, self._served = policy, canary, candidate.weights or self._served
            await swap.commit()
            prune_pulled(candidate.folder.parent, self._folders_in_use())
            return canary
        except RollbackFailedError:
            self._broken = True
            _log.exception("rollback failed version=%d: restarting", row.policy.version)
            os.kill(os.getpid(), signal.SIGTERM)
            raise
        finally:
            if not self._broken:
                self.gate.open()

    async def _prepare(self, swap: WeightSwap | AdapterSwap) -> None:
        try:
            await swap.prepare()
        except TimeoutError as error:
            raise BusyError(f"the engine did not pause within {self.plan.drain_timeout_s:g} s; try again") from error

    def _folders_in_use(self) -> set[str]:
        rows = (self.policies.base, *self.policies.named.values())
        folders = ((row.policy.folder, row.policy.weights) for row in rows)
        return {folder.name for pair in folders for folder in pair}

    def _swap_of(self, candidate: CheckpointCandidate, earlier: ServedPolicy) -> WeightSwap | AdapterSwap:
        if candidate.weights is None and not self._engine.merges_adapters:
            return AdapterSwap(self._engine, candidate, earlier)
        pause: Drain | Freeze = self._drain(f"version {candidate.version} of the weights is being loaded")
        if self.plan.swap_in_flight and earlier.adapter is None and not self.policies.named:
            # Requests with an adapter cannot go on: it belongs to the earlier weights.
            pause = Freeze(self.gate, self._engine, self.plan.drain_timeout_s)
        return WeightSwap(self._engine, self._tap, pause, candidate, earlier)

    def _drain(self, why: str) -> Drain:
        return Drain(self.gate, self._tap, self._engine, self.plan.drain_timeout_s, why)


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

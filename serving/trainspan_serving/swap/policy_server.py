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

from trainspan_schemas.errors import CheckpointError, one_line
from trainspan_serving.capture.engine_tap import EngineTap
from trainspan_serving.checkpoints.candidates import CheckpointCandidate, find_candidate
from trainspan_serving.checkpoints.copies import CopiesFolder
from trainspan_serving.checkpoints.copying import Copying
from trainspan_serving.checkpoints.merged import check_can_merge
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.checkpoints.source import CheckpointSource, CopyFailedError, DamagedCopyError
from trainspan_serving.checkpoints.weights import Weights, read_weights
from trainspan_serving.process.link import report
from trainspan_serving.process.server_plan import ServerPlan
from trainspan_serving.swap.adapter_swap import AdapterSwap
from trainspan_serving.swap.canary import CanaryReport
from trainspan_serving.swap.drain import Drain, Freeze
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.gate import Gate
from trainspan_serving.swap.policy_table import PolicyRow, PolicyTable, first_policies
from trainspan_serving.swap.verifier import Verifier
from trainspan_serving.swap.weight_swap import RollbackFailedError, WeightSwap

__all__ = ["BusyError", "CanaryFailedError", "LoadFailedError", "PolicyServer", "SwapResult"]

_log = logging.getLogger(__name__)

_COPY_ANSWER_S = 15.0
"""A request that waits longer for a copy is answered with how far it is, so that no time limit cuts it off."""


class CanaryFailedError(CheckpointError):
    """The engine did not compute with the checkpoint after loading it: the earlier policy is in service."""

    def __init__(self, message: str, canary: CanaryReport) -> None:
        super().__init__(message)
        self.canary = canary


class LoadFailedError(Exception):
    """The engine could not load a fitting checkpoint: the earlier policy is in service, or the server still asleep."""


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
        """Outcome (a canary status, `undone`, `failed`, `refused`, `uncopied` or `busy`) → count."""
        self.swap_seconds = 0.0
        """Total of all successful swaps."""
        self._engine = engine
        self.tap = tap
        self._verifier = Verifier(engine, tap, plan.settings.canary_tolerance)
        self._served = served
        self.source = CheckpointSource(url) if (url := plan.settings.checkpoints_url) else None
        """Where checkpoints are copied from; None: they are in the folder."""
        copies = CopiesFolder(plan.checkpoints, self.source) if self.source else None
        self._copying = Copying(copies, self._folders_in_use) if copies else None
        self._candidate: CheckpointCandidate | None = None
        """The one that is being swapped in."""
        self.behind: str | None = None
        """Why it may not serve what the trainer names as accepted; None if it does, as far as it knows."""
        self.is_ready = True
        """Whether a balancer may use it: False if it knows of an accepted checkpoint that it does not serve since its start."""
        self._changing = asyncio.Lock()
        self._broken = False

    @classmethod
    async def start(cls, plan: ServerPlan, engine: Engine, tap: EngineTap) -> "PolicyServer":
        """Labels the engine's weights with their version, and loads the plan's adapters."""
        folder = await asyncio.to_thread(_local_folder, plan.model)
        served = await asyncio.to_thread(read_weights, folder)
        await engine.label(plan.version)
        policies = await first_policies(plan, engine, folder)
        server = cls(plan, engine, tap, policies, served)
        first = server.policy
        await server._verifier.calibrate(replace(first, merged=None))
        if first.merged:
            await asyncio.to_thread(check_can_merge, first.merged, served)
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

    async def swap(
        self,
        checkpoint: str,
        version: int,
        policy: str | None = None,
        weights_sha256: str | None = None,
        *,
        instead_of: ServedPolicy | None = None,
    ) -> SwapResult:
        """Serves `checkpoint` (a name under `--checkpoints`, in the policy's folder) as `version` of `policy`.

        With `instead_of` only if that is still what the policy serves; otherwise raises BusyError.

        Raises CheckpointError if it does not fit, CopyFailedError if its files are not those with `weights_sha256` (None:
        any), CopyingError while they are copied, BusyError during another change (nothing was touched), and CanaryFailedError
        or LoadFailedError if the earlier policy was restored.
        """
        seconds: dict[str, float] = {}
        try:
            self._check_works()
            self.policies.row(policy)
            await self._fetch(checkpoint, policy, weights_sha256, yields_to_others=instead_of is not None)
            async with self._alone():
                if instead_of is not None and self.policies.row(policy).policy is not instead_of:
                    raise BusyError(f"another checkpoint than {checkpoint} was swapped in meanwhile")
                with _timed(seconds, "total"):
                    row = self.policies.row(policy)
                    with _timed(seconds, "validate"):
                        candidate = await self._validated(checkpoint, version, policy, weights_sha256)
                    canary = await self._exchange(row, candidate, seconds)
        except (CheckpointError, LoadFailedError, BusyError) as error:
            self.swaps[_outcome_of(error)] += 1
            raise
        self.swaps[canary.status] += 1
        self.swap_seconds += seconds["total"]
        self.behind, self.is_ready = None, True
        served, took_s = row.policy, seconds["total"]
        adapter = str(served.adapter_folder) if served.adapter_folder else None
        model = str(served.weights)
        report({"event": "policy", "policy": policy, "model": model, "adapter": adapter, "version": version})
        _log.info("policy=%s swapped version=%d canary=%s seconds=%.3f", served.name, version, canary.status, took_s)
        return SwapResult(version, checkpoint, canary, seconds)

    async def stage(
        self,
        checkpoint: str,
        version: int,
        policy: str | None = None,
        weights_sha256: str | None = None,
        *,
        yields_to_others: bool = False,
    ) -> None:
        """Copies a checkpoint from its URL, if one is set, and validates it, while requests go on.

        If it `yields_to_others`, it does not end the copy of another checkpoint, but fails.
        Its files are then in the page cache, so that a swap reads no disk. Raises CheckpointError if it does not fit,
        CopyFailedError if its files are not those with `weights_sha256`, CopyingError while they are copied, BusyError if the
        server is restarting.
        """
        self._check_works()
        self.policies.row(policy)
        await self._fetch(checkpoint, policy, weights_sha256, yields_to_others=yields_to_others)
        await self._validated(checkpoint, version, policy, weights_sha256)

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
        self._check_works()
        if self._changing.locked():
            raise BusyError("another swap, sleep or wake request is in progress; try again")
        async with self._changing:
            yield

    def stop_copying(self) -> None:
        """Ends copies with their next bytes."""
        if self._copying is not None:
            self._copying.stop()

    def _check_works(self) -> None:
        if self._broken:
            raise BusyError("the server is restarting; try again")

    async def _fetch(
        self, checkpoint: str, policy: str | None, weights_sha256: str | None, *, yields_to_others: bool
    ) -> None:
        if self._copying is not None:
            await self._copying.fetch(
                checkpoint, policy, weights_sha256, within_s=_COPY_ANSWER_S, yields_to_others=yields_to_others
            )

    async def _validated(
        self, checkpoint: str, version: int, policy: str | None, weights_sha256: str | None
    ) -> CheckpointCandidate:
        try:
            return await asyncio.to_thread(
                find_candidate,
                self.plan.checkpoints,
                policy,
                checkpoint,
                version,
                weights_sha256,
                served=self._served,
                limits=self._engine.limits,
            )
        except DamagedCopyError:
            if self._copying is not None:
                await self._copying.discard(checkpoint, policy)
            raise

    async def _exchange(
        self, row: PolicyRow, candidate: CheckpointCandidate, seconds: dict[str, float]
    ) -> CanaryReport:
        """Loads and verifies the candidate, then commits it as the row's policy or restores the earlier one.

        If the earlier weights cannot be restored, the gate stays closed and this process ends: its supervisor restarts
        it with those weights. The gate also stays closed if the server was asleep and could not be woken.
        """
        name = candidate.folder.name
        self._candidate = candidate
        swap = self._swap_of(candidate, row.policy)
        try:
            with _timed(seconds, "drain"):
                await self._prepare(swap, name)
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
            return canary
        except RollbackFailedError:
            self._broken = True
            _log.exception("rollback failed version=%d: restarting", row.policy.version)
            os.kill(os.getpid(), signal.SIGTERM)
            raise
        finally:
            self._candidate = None
            if not self._broken and not self.asleep:
                self.gate.open()

    async def _prepare(self, swap: WeightSwap | AdapterSwap, name: str) -> None:
        try:
            await swap.prepare()
        except TimeoutError as error:
            raise BusyError(
                f"the engine did not pause within {self.plan.settings.drain_timeout_s:g} s; try again"
            ) from error
        except Exception as error:
            if not self.asleep:
                await self._engine.resume()
            raise LoadFailedError(f"the engine could not be prepared for {name}: {one_line(error)}") from error

    def _folders_in_use(self) -> set[Path]:
        """What the server serves, may fall back to, or loads."""
        rows = (self.policies.base, *self.policies.named.values())
        folders = {folder.resolve() for row in rows for folder in (row.policy.folder, row.policy.weights)}
        return folders | ({self._candidate.folder.resolve()} if self._candidate else set())

    def _swap_of(self, candidate: CheckpointCandidate, earlier: ServedPolicy) -> WeightSwap | AdapterSwap:
        if candidate.weights is None and not self._engine.merges_adapters:
            return AdapterSwap(self._engine, candidate, earlier)
        pause: Drain | Freeze = self._drain(f"version {candidate.version} of the weights is being loaded")
        if self.plan.settings.swap_in_flight and earlier.adapter is None and not self.policies.named:
            # Requests with an adapter cannot go on: it belongs to the earlier weights.
            pause = Freeze(self.gate, self._engine, self.plan.settings.drain_timeout_s)
        return WeightSwap(self._engine, self.tap, pause, candidate, earlier)

    def _drain(self, why: str) -> Drain:
        return Drain(self.gate, self.tap, self._engine, self.plan.settings.drain_timeout_s, why)


def _outcome_of(error: Exception) -> str:
    """Returns the key under which `PolicyServer.swaps` counts the error."""
    outcomes = {CanaryFailedError: "undone", LoadFailedError: "failed", BusyError: "busy", CopyFailedError: "uncopied"}
    return outcomes.get(type(error), "refused")


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

"""The policy in service, and its exchange for another: validated, drained, loaded, checked by the canary, or undone."""

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.checkpoint import CANARY_FILE, Canary, CheckpointMeta
from trainspan_schemas.errors import CheckpointError

from .canary import ABSENT, CanaryReport, check_prompts, judge, score
from .capture import EngineTap
from .export import Exporter
from .gate import Gate
from .link import report
from .plan import ServerPlan
from .weights import Weights, check_fits, read_weights

__all__ = ["CheckpointNotFoundError", "Policy", "PolicyServer", "SwapResult", "SwapUndoneError"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CheckpointNotFoundError(CheckpointError):
    """No folder of that name under `--checkpoints`."""


class SwapUndoneError(CheckpointError):
    """The exchange was not made, or was undone: the earlier policy is in service."""

    def __init__(self, message: str, canary: CanaryReport = ABSENT) -> None:
        super().__init__(message)
        self.canary = canary


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights in service."""

    version: int
    folder: Path


@dataclass(frozen=True, slots=True)
class SwapResult:
    """What a successful exchange reports."""

    version: int
    checkpoint: str
    canary: CanaryReport
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Candidate:
    policy: Policy
    canary: Canary | None


class PolicyServer:
    """Owns the gate and the exchange of weights; one at a time."""

    def __init__(
        self, plan: ServerPlan, engine: Any, tap: EngineTap, exporter: Exporter, policy: Policy, served: Weights
    ) -> None:
        self.gate = Gate()
        self.policy = policy
        self.plan = plan
        self._engine, self._tap, self._exporter = engine, tap, exporter
        self._served = served
        self._canary: CanaryReport | None = None
        self._swapping = asyncio.Lock()
        self._broken = False

    @classmethod
    async def start(cls, plan: ServerPlan, engine: Any, tap: EngineTap, exporter: Exporter) -> "PolicyServer":
        """Labels the engine's weights with the version they are served as."""
        folder = await asyncio.to_thread(_local_folder, plan.model)
        served = await asyncio.to_thread(read_weights, folder)
        await engine.update_weight_version(str(plan.version))
        return cls(plan, engine, tap, exporter, Policy(plan.version, folder), served)

    def state(self) -> dict[str, Any]:
        """The answer to `GET /trainspan/policy`."""
        counts = self._exporter.counts()
        return {
            "version": self.policy.version,
            "checkpoint": self.policy.folder.name,
            "model": self.plan.served_name,
            "in_flight": self.gate.in_flight,
            "open": self.gate.is_open,
            "canary": self._canary.as_json() if self._canary else None,
            "calls_captured": counts.captured,
            "calls_exported": counts.exported,
            "calls_dropped": counts.dropped,
        }

    async def swap(self, checkpoint: str, version: int) -> SwapResult:
        """Serves `checkpoint` (a name under `--checkpoints`) as `version`.

        Raises CheckpointError where it does not fit (nothing was touched), SwapUndoneError where requests did not end
        in time or the canary failed (the earlier policy is in service).
        """
        if self._swapping.locked():
            raise SwapUndoneError("another swap is under way; try again")
        async with self._swapping:
            seconds: dict[str, float] = {}
            with _timed(seconds, "total"):
                with _timed(seconds, "validate"):
                    candidate = await asyncio.to_thread(self._validate, checkpoint, version)
                canary = await self._exchange(candidate, seconds)
            self._canary = canary
            report({"event": "policy", "model": str(candidate.policy.folder), "version": version})
            _log.info("policy swapped version=%d canary=%s seconds=%.3f", version, canary.status, seconds["total"])
            return SwapResult(version, checkpoint, canary, seconds)

    def _validate(self, checkpoint: str, version: int) -> _Candidate:
        folder = _resolve(Path(self.plan.checkpoints), checkpoint)
        meta = CheckpointMeta.read(folder)
        weights = read_weights(folder)
        if meta.version != version:
            raise CheckpointError(f"{checkpoint} holds version {meta.version}, not {version}")
        check_fits(weights, self._served)
        canary = Canary.read(folder) if (folder / CANARY_FILE).is_file() else None
        if canary:
            config = self._engine.model_config
            check_prompts(canary, vocab_size=config.get_vocab_size(), max_tokens=config.max_model_len)
        return _Candidate(Policy(version, folder), canary)

    async def _exchange(self, candidate: _Candidate, seconds: dict[str, float]) -> CanaryReport:
        earlier, name = self.policy, candidate.policy.folder.name
        try:
            with _timed(seconds, "drain"):
                await self._drain()
            try:
                with _timed(seconds, "reload"):
                    await self._load(candidate.policy)
                with _timed(seconds, "canary"):
                    canary = await self._check(candidate)
            except Exception as error:
                await self._undo(earlier)
                raise SwapUndoneError(f"loading {name} failed: {error}") from error
            if canary.status == "stale":
                await self._undo(earlier)
                self._canary = canary
                raise SwapUndoneError(
                    f"the server's log-probabilities under {name} are {canary.max_abs_diff:.3g} off the trainer's "
                    f"(tolerance {canary.tolerance:g}); version {earlier.version} stays in service",
                    canary,
                )
            self.policy = candidate.policy
            return canary
        finally:
            if not self._broken:
                self.gate.open()

    async def _drain(self) -> None:
        """Nothing is generated any more: our gate holds what comes through it, the engine's own pause what does not."""
        limit_s = self.plan.drain_timeout_s
        if not await self.gate.close(limit_s):
            raise SwapUndoneError(f"{self.gate.in_flight} requests were still under way after {limit_s:g} s; try again")
        try:
            await asyncio.wait_for(self._engine.pause_generation(mode="wait"), limit_s)
        except TimeoutError as error:
            await self._engine.resume_generation()
            raise SwapUndoneError(f"background requests were still under way after {limit_s:g} s; try again") from error

    async def _load(self, policy: Policy) -> None:
        """Loads weights into the paused engine, which goes on afterwards."""
        await self._engine.collective_rpc("trainspan_reload", args=(str(policy.folder),))
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache, computed by the earlier weights, could not be emptied")
        await self._engine.update_weight_version(str(policy.version))
        await self._engine.resume_generation()

    async def _check(self, candidate: _Candidate) -> CanaryReport:
        if candidate.canary is None:
            _log.warning(
                "no canary checkpoint=%s: nothing proves that its weights are served", candidate.policy.folder.name
            )
            return ABSENT
        scores = await score(self._tap, candidate.canary, candidate.policy.version)
        dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        return judge(candidate.canary, scores, tolerance=self.plan.canary_tolerance, dtype=dtype)

    async def _undo(self, earlier: Policy) -> None:
        """Loads the earlier weights again.

        Where that fails too, the gate stays shut and this process ends: its supervisor starts another with them.
        """
        try:
            await self._engine.pause_generation(mode="abort")
            await self._load(earlier)
        except Exception:
            self._broken = True
            _log.exception("rollback failed version=%d: restarting", earlier.version)
            os.kill(os.getpid(), signal.SIGTERM)
            raise


def _resolve(checkpoints: Path, name: str) -> Path:
    """The folder `name` directly under `checkpoints`; links lead nowhere."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name[:80]!r} is no checkpoint name: a folder name under {checkpoints} is meant")
    root = checkpoints.resolve()
    folder = root / name
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"no checkpoint {name!r} in {checkpoints}")
    links = [path.name for path in (folder, *folder.iterdir()) if path.is_symlink()]
    if links:
        raise CheckpointError(f"checkpoint {name!r} has a symbolic link, {links[0]!r}: copy the file instead")
    return folder


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

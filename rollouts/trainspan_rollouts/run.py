"""Runs an agent on tasks: n rollouts of each, with concurrency, timeout, retries and a judge."""

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trainspan_rollouts.commands import CommandExecutor
from trainspan_rollouts.execution import Ended, Execution, Executor
from trainspan_rollouts.judge import Judge, Result, score_of
from trainspan_rollouts.pool import WorkerPool
from trainspan_rollouts.spans import RolloutSpans
from trainspan_rollouts.tasks import Task, read_tasks
from trainspan_schemas.errors import UsageError
from trainspan_schemas.functions import is_function_name
from trainspan_schemas.identity import Identity, Split
from trainspan_schemas.keys import REWARD
from trainspan_schemas.status import RolloutStatus

__all__ = ["Progress", "RunResult", "RunSettings", "run_rollouts"]

RETRY_DELAY_S: Final = 0.5
"""Before the first further attempt; doubled for each one after it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What to run, and how."""

    tasks: Path
    target: tuple[str, ...]
    """One `module:function`, or a command and its arguments."""
    run_id: str
    n: int = 8
    split: Split | None = None
    """Label of the rollouts; tasks marked for the other split are left out. None: each task's own, else train."""
    round: int = 0
    concurrency: int = 16
    workers: int = 1
    timeout_s: float = 120.0
    retries: int = 1
    judge: str | None = None
    policy_url: str = "http://127.0.0.1:8000/v1"
    collector: str = "http://127.0.0.1:4317"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    done: int
    failed: int
    """Of those done, the ones whose status is not `ok`."""
    total: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to."""

    run_id: str
    round: int
    split: Split | None
    total: int
    status: dict[str, int]
    """Final status → rollouts."""
    mean_reward: float | None
    """Over the rollouts that have a reward."""
    rewarded: int
    calls: int
    """Model calls that succeeded, of all attempts, as far as the agents could tell."""
    seconds: float
    lost_spans: int
    """Rollout spans that did not reach the collector."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: RolloutStatus
    scores: dict[str, float]
    source: str
    reward: float | None
    error: str | None


def run_rollouts(settings: RunSettings, on_progress: Callable[[Progress], None] | None = None) -> RunResult:
    """Runs all rollouts and sends their spans.

    Raises UsageError, TaskFileError or ProcessError before anything has run where tasks, target or judge cannot be used.
    SIGINT and SIGTERM end the agents, mark their rollouts `cancelled`, send what there is, and raise KeyboardInterrupt.
    """
    return asyncio.run(_interruptible(_Run(settings, on_progress)))


async def _interruptible(run: "_Run") -> RunResult:
    task = asyncio.create_task(run.execute())
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    with contextlib.suppress(ValueError, RuntimeError):  # in a thread there are no signals to handle
        for number in signals:
            loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in signals:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)


class _Run:
    def __init__(self, settings: RunSettings, on_progress: Callable[[Progress], None] | None) -> None:
        self._settings = settings
        self._on_progress = on_progress
        self._total = settings.n * sum(1 for _ in read_tasks(settings.tasks, settings.split))
        self._judge = Judge(settings.judge, settings.timeout_s) if settings.judge else None
        self._executor = _executor(settings)
        self._spans = RolloutSpans(settings.collector)
        self._status: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._calls = 0
        self._complained: set[str] = set()

    async def execute(self) -> RunResult:
        start_s = time.monotonic()
        plan = self._plan()
        try:
            await self._executor.start()
            self._tell()
            width = max(1, min(self._settings.concurrency, self._total))
            async with asyncio.TaskGroup() as group:
                for _ in range(width):
                    group.create_task(self._work(plan))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await asyncio.shield(self._executor.close())
            lost = await asyncio.to_thread(self._spans.close)
        if lost:
            _log.warning(
                "event=rollout_spans_lost spans=%d collector=%s; these rollouts cannot be trained on",
                lost,
                self._settings.collector,
            )
        settings = self._settings
        return RunResult(
            settings.run_id,
            settings.round,
            settings.split,
            self._total,
            dict(sorted(self._status.items())),
            self._mean_reward(),
            len(self._rewards),
            self._calls,
            time.monotonic() - start_s,
            lost,
        )

    def _plan(self) -> Iterator[tuple[Task, Identity]]:
        settings = self._settings
        for task in read_tasks(settings.tasks, settings.split):
            split = settings.split or task.split or "train"
            for _ in range(settings.n):
                yield task, Identity(uuid.uuid4().hex, settings.run_id, task.id, 0, settings.round, split)

    async def _work(self, plan: Iterator[tuple[Task, Identity]]) -> None:
        for task, identity in plan:
            verdict = await self._rollout(task, identity)
            self._status[verdict.status] += 1
            if verdict.reward is not None:
                self._rewards.append(verdict.reward)
            self._tell()

    async def _rollout(self, task: Task, identity: Identity) -> _Verdict:
        """All attempts at one rollout; the last one's verdict."""
        failures = 0
        while True:
            verdict, blameless = await self._attempt(task, identity)
            if verdict.status != "infra_error":
                return verdict
            if not blameless:
                failures += 1
                if failures > self._settings.retries:
                    return verdict
                await asyncio.sleep(RETRY_DELAY_S * 2 ** (failures - 1))
            identity = replace(identity, attempt=identity.attempt + 1)

    async def _attempt(self, task: Task, identity: Identity) -> tuple[_Verdict, bool]:
        span = self._spans.begin(identity)
        judge = self._judge.name if self._judge else None
        try:
            ended = await self._executor.execute(Execution(task, identity, span.parent))
            verdict = await self._judged(task, identity, ended)
        except asyncio.CancelledError:
            span.end("cancelled", judge=judge, error="the run was stopped")
            raise
        calls = ended.report.calls if ended.report else None
        self._calls += calls or 0
        span.end(
            verdict.status,
            calls=calls,
            judge=judge,
            scores=verdict.scores,
            source=verdict.source,
            error=verdict.error,
        )
        self._complain(verdict, identity)
        return verdict, ended.blameless

    async def _judged(self, task: Task, identity: Identity, ended: Ended) -> _Verdict:
        """The reward: the judge's, else what the agent gave itself, else the number that the function returned."""
        if ended.status != "ok":
            return _Verdict(ended.status, {}, "judge", None, ended.error)
        if self._judge is not None:
            result = Result(
                ended.status, ended.value, ended.stdout_tail, ended.exit_code, ended.duration_s, identity.rollout_id
            )
            try:
                scores = await self._judge.scores(task.for_judge(), result)
            except Exception as error:  # noqa: BLE001 - the user's code: its fault is a status
                text = f"judge {self._judge.name}: {type(error).__name__}: {' '.join(str(error).split())}"
                return _Verdict("judge_error", {}, "judge", None, text)
            return _Verdict("ok", scores, "judge", scores.get(REWARD), None)
        if ended.report and ended.report.rewards:
            return _Verdict("ok", {}, "agent", sum(ended.report.rewards), None)
        if isinstance(ended.value, (int, float)):
            try:
                score = score_of(ended.value, "the agent")
            except ValueError as error:
                self._complain(_Verdict("ok", {}, "return", None, str(error)), identity)
            else:
                return _Verdict("ok", {REWARD: score}, "return", score, None)
        return _Verdict("ok", {}, "return", None, None)

    def _tell(self) -> None:
        if self._on_progress:
            done = self._status.total()
            self._on_progress(Progress(done, done - self._status["ok"], self._total, self._mean_reward()))

    def _mean_reward(self) -> float | None:
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    def _complain(self, verdict: _Verdict, identity: Identity) -> None:
        """Each sort of failure once as a warning, every one for those who look closer."""
        if verdict.error is None:
            return
        sort = f"{verdict.status}: {verdict.error}"
        level = logging.DEBUG if sort in self._complained or len(self._complained) >= 20 else logging.WARNING
        self._complained.add(sort)
        _log.log(
            level,
            "event=rollout_failed status=%s task=%s rollout=%s attempt=%d error=%r",
            verdict.status,
            identity.task_id,
            identity.rollout_id,
            identity.attempt,
            verdict.error,
        )


def _executor(settings: RunSettings) -> Executor:
    for name in ("n", "concurrency", "workers"):
        if getattr(settings, name) < 1:
            raise UsageError(f"{name} = {getattr(settings, name)}: it must be at least 1")
    if settings.timeout_s <= 0 or settings.retries < 0:
        raise UsageError(
            f"timeout_s = {settings.timeout_s:g}, retries = {settings.retries}: the timeout must be positive, retries not negative"
        )
    common = (settings.policy_url, settings.collector, settings.timeout_s, os.environ)
    if is_function_target(settings.target):
        workers = min(settings.workers, settings.concurrency)
        return WorkerPool(settings.target[0], workers, *common)
    return CommandExecutor(settings.target, *common)


def is_function_target(target: Sequence[str]) -> bool:
    """Whether the target is `module:function`, as against a command. Raises UsageError for an empty one."""
    if not target:
        raise UsageError("no agent to run: name module:function, or a command after --")
    return len(target) == 1 and is_function_name(target[0])

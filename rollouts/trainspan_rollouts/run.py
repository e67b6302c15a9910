"""Runs an agent on tasks: n rollouts of each, with concurrency, timeout, retries and a judge."""

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from trainspan_rollouts.executor import Ended, Execution
from trainspan_rollouts.executors import choose_executor
from trainspan_rollouts.judge import Judge, Result
from trainspan_rollouts.records import Progress, RunResult, RunSettings
from trainspan_rollouts.rollout_spans import RolloutSpans
from trainspan_rollouts.run_ledger import RunLedger, ledger_file
from trainspan_rollouts.task_file import Task, count_tasks, read_tasks
from trainspan_schemas.agents.functions import number_of
from trainspan_schemas.errors import UsageError
from trainspan_schemas.store.endpoint import headers_of
from trainspan_schemas.store.roles import Role
from trainspan_schemas.store.senders import sender_headers
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.keys import REWARD
from trainspan_schemas.telemetry.signing import signing_key
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["run_rollouts"]

CANCELLED_DELIVERY_S: Final = 5.0
"""How long an interrupted run waits for the collector; the rest is in the ledger."""
RETRY_DELAY_S: Final = 0.5
"""Delay before the first retry; doubled for each further one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: RolloutStatus
    scores: dict[str, float]
    source: str
    reward: float | None
    error: str | None


def run_rollouts(settings: RunSettings, on_progress: Callable[[Progress], None] | None = None) -> RunResult:
    """Runs all rollouts and sends their spans.

    Raises UsageError, TaskFileError or ProcessError before anything runs if tasks, target or judge cannot be used.
    SIGINT and SIGTERM end the agents, mark their rollouts `cancelled`, send all spans, and raise KeyboardInterrupt.
    """
    return asyncio.run(_interruptible(_Run(settings, on_progress)))


async def _interruptible(run: "_Run") -> RunResult:
    task = asyncio.create_task(run.execute())
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    with contextlib.suppress(ValueError, RuntimeError):  # only the main thread can handle signals
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
        if settings.limit is not None and settings.limit < 1:
            raise UsageError(f"limit = {settings.limit}: it must be at least 1 task")
        tasks = count_tasks(settings.tasks, settings.split)
        self._total = settings.n * (tasks if settings.limit is None else min(tasks, settings.limit))
        self._judge = (
            Judge(settings.judge, settings.judge_concurrency, settings.judge_timeout_s) if settings.judge else None
        )
        self._agents = asyncio.Semaphore(settings.concurrency)
        self._key = signing_key(settings.signing_key_file)
        self._executor = choose_executor(settings)
        file = ledger_file(settings.run_id, settings.round, settings.split)
        self._ledger = RunLedger(file, settings.tasks, settings.target, resume=settings.resume)
        self._spans = RolloutSpans(settings.collector, self._headers, self._ledger)
        if self._headers() is None and "authorization" not in headers_of(
            os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
        ):
            _log.warning(
                "event=runner_without_token collector=%s: a trainspan collector treats its verdicts as an agent's; "
                "give --token-file",
                settings.collector,
            )
        self._status: Counter[str] = Counter()
        self._rewarded = self._resumed = 0
        self._reward_sum = 0.0
        self._calls = 0
        self._complained: set[str] = set()

    def _headers(self) -> str | None:
        settings = self._settings
        return sender_headers(
            Role.RUNNER, settings.collector, os.environ, token_file=settings.token_file, store=settings.store
        )

    async def execute(self) -> RunResult:
        start_s = time.monotonic()
        deliver_s = CANCELLED_DELIVERY_S
        plan = self._plan()
        try:
            await self._executor.start()
            self._report_progress()
            # Rollouts at the judge come on top, so that agents keep running; more would queue up for the judge.
            judged = self._settings.judge_concurrency if self._judge else 0
            width = max(1, min(self._settings.concurrency + judged, self._total))
            async with asyncio.TaskGroup() as group:
                for _ in range(width):
                    group.create_task(self._work(plan))
            deliver_s = self._settings.deliver_timeout_s
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await asyncio.shield(self._executor.close())
            if self._judge:
                self._judge.close()
            unacknowledged = await asyncio.to_thread(self._spans.close, deliver_s)
            self._ledger.close()
        if unacknowledged:
            _log.error(
                "event=verdicts_unacknowledged rollouts=%d collector=%s; start the collector, then send them by the same "
                "command with --run %s --resume",
                unacknowledged,
                self._settings.collector,
                self._settings.run_id,
            )
        settings = self._settings
        return RunResult(
            settings.run_id,
            settings.round,
            settings.split,
            self._total,
            dict(sorted(self._status.items())),
            self._mean_reward(),
            self._rewarded,
            self._calls,
            time.monotonic() - start_s,
            unacknowledged,
            self._resumed,
        )

    def _plan(self) -> Iterator[tuple[Task, int, Identity]]:
        """Yields the rollouts to run: task, number of the rollout within its task, identity."""
        settings = self._settings
        for task in islice(read_tasks(settings.tasks, settings.split), settings.limit):
            split = settings.split or task.split or "train"
            for number in range(settings.n):
                if finished := self._ledger.finished(task.id, number):
                    self._resumed += 1
                    self._enter(finished.status, finished.reward)
                    continue
                begun = self._ledger.begun(task.id, number)
                rollout_id, attempt = (begun.rollout_id, begun.attempt + 1) if begun else (uuid.uuid4().hex, 0)
                yield task, number, Identity(rollout_id, settings.run_id, task.id, attempt, settings.round, split)

    async def _work(self, plan: Iterator[tuple[Task, int, Identity]]) -> None:
        for task, number, identity in plan:
            verdict = await self._rollout(task, number, identity)
            self._enter(verdict.status, verdict.reward)
            self._report_progress()

    def _enter(self, status: RolloutStatus, reward: float | None) -> None:
        self._status[status] += 1
        if reward is not None:
            self._rewarded += 1
            self._reward_sum += reward

    async def _rollout(self, task: Task, number: int, identity: Identity) -> _Verdict:
        """Makes all attempts at one rollout; returns the last verdict."""
        failures = 0
        while True:
            verdict, blameless = await self._attempt(task, number, identity)
            if verdict.status != "infra_error":
                return verdict
            if not blameless:
                failures += 1
                if failures > self._settings.retries:
                    return verdict
                await asyncio.sleep(RETRY_DELAY_S * 2 ** (failures - 1))
            identity = replace(identity, attempt=identity.attempt + 1)

    async def _attempt(self, task: Task, number: int, identity: Identity) -> tuple[_Verdict, bool]:
        await self._agents.acquire()
        self._ledger.begin(identity, number)
        span = self._spans.begin(identity, self._settings.n)
        judge = self._judge.name if self._judge else None
        try:
            signed = identity.signed(self._key, span.parent)
            token = f"{span.parent}.{signed.url_signature}"
            try:
                ended = await self._executor.execute(Execution(task, signed, span.parent, token))
            finally:
                self._agents.release()
            verdict = await self._judged(task, identity, ended)
        except asyncio.CancelledError:
            self._ledger.end(identity, number, "cancelled", None)
            span.end("cancelled", judge=judge, error="the run was stopped")
            raise
        calls = ended.report.calls if ended.report else None
        self._calls += calls or 0
        self._ledger.end(identity, number, verdict.status, verdict.reward)
        span.end(
            verdict.status,
            calls=calls,
            judge=judge,
            scores=verdict.scores,
            source=verdict.source,
            error=verdict.error,
        )
        self._log_failure(verdict, identity)
        return verdict, ended.blameless

    async def _judged(self, task: Task, identity: Identity, ended: Ended) -> _Verdict:
        """Returns the judge's reward, otherwise the agent's own, otherwise the number that the function returned."""
        if ended.status != "ok":
            return _Verdict(ended.status, {}, "judge", None, ended.error)
        if self._judge is not None:
            result = Result(
                ended.status, ended.value, ended.stdout_tail, ended.exit_code, ended.duration_s, identity.rollout_id
            )
            try:
                scores = await self._judge.scores(task.for_judge(), result)
            except Exception as error:  # noqa: BLE001 - user code: its failure becomes a status
                text = f"judge {self._judge.name}: {type(error).__name__}: {' '.join(str(error).split())}"
                return _Verdict("judge_error", {}, "judge", None, text)
            return _Verdict("ok", scores, "judge", scores.get(REWARD), None)
        if ended.report and ended.report.rewards:
            return _Verdict("ok", {}, "agent", sum(ended.report.rewards), None)
        if isinstance(ended.value, (int, float)):
            try:
                score = number_of(ended.value, "the agent")
            except ValueError as error:
                self._log_failure(_Verdict("ok", {}, "return", None, str(error)), identity)
            else:
                return _Verdict("ok", {REWARD: score}, "return", score, None)
        return _Verdict("ok", {}, "return", None, None)

    def _report_progress(self) -> None:
        if self._on_progress:
            done = self._status.total()
            self._on_progress(Progress(done, done - self._status["ok"], self._total, self._mean_reward()))

    def _mean_reward(self) -> float | None:
        return self._reward_sum / self._rewarded if self._rewarded else None

    def _log_failure(self, verdict: _Verdict, identity: Identity) -> None:
        """Logs each kind of failure once as a warning, and every repetition at debug level."""
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

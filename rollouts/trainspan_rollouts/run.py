"""Runs an agent on tasks: n rollouts of each, with concurrency, timeout, retries and a judge."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from trainspan_rollouts.attempts import Attempts
from trainspan_rollouts.executors.branching import Branching
from trainspan_rollouts.executors.choice import choose_executor
from trainspan_rollouts.judges.choice import find_judge
from trainspan_rollouts.judges.judge import Judge
from trainspan_rollouts.ledger.paths import run_folder
from trainspan_rollouts.ledger.run_ledger import open_ledger
from trainspan_rollouts.plan import Plan
from trainspan_rollouts.records import RunSettings
from trainspan_rollouts.rollout_spans import RolloutSpans
from trainspan_rollouts.task_stream import STDIN
from trainspan_rollouts.totals import Totals
from trainspan_schemas.artifacts.judge_report import JudgeFigures, write_judge_figures
from trainspan_schemas.command_events import Progress, RunResult
from trainspan_schemas.errors import UsageError
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.store.endpoint import headers_of
from trainspan_schemas.store.roles import Role
from trainspan_schemas.store.senders import sender_headers, token_advice
from trainspan_schemas.telemetry.signing import signing_key

__all__ = ["run_rollouts"]

CANCELLED_DELIVERY_S: Final = 5.0
"""How long an interrupted run waits for the collector; the rest is in the ledger."""

_log = logging.getLogger(__name__)


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
        if settings.shard.count > 1 and settings.tasks == STDIN:
            raise UsageError("--shard divides a task file; give each process its own tasks on standard input")
        size = Plan.size(settings)
        self._is_streamed = size is None
        self._totals = Totals(size or 0)
        self._judge = None
        if settings.judge:
            judge = find_judge(settings.judge, settings.judge_timeout_s)
            self._judge = Judge(judge, settings.judge_concurrency, settings.judge_timeout_s)
        if self._judge and self._judge.compares and settings.n < 2:
            raise UsageError(f"--judge {settings.judge} compares the rollouts of a task: --n must be at least 2")
        if self._judge and self._judge.compares and settings.branches is not None:
            raise UsageError(
                f"--judge {settings.judge} compares the rollouts of a group: values of states need one that scores each rollout alone"
            )
        key = signing_key(settings.signing_key_file)
        self._executor = choose_executor(settings, self._judge.secrets if self._judge else ())
        self._ledger = open_ledger(settings, self._judge.digest if self._judge else None)
        collectors = Collectors.of(settings.collector)
        self._spans = RolloutSpans(collectors, self._headers, self._ledger, advice=self._advice)
        if "authorization" not in headers_of(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")):
            for url in collectors.urls:
                if self._headers(url) is None:
                    _log.warning(
                        "event=runner_without_token collector=%s: a trainspan collector treats its verdicts as an agent's; "
                        "give --token-file",
                        url,
                    )
        branching = None
        if settings.branches is not None:
            branching = Branching(
                settings.branches, settings.policy_servers or [settings.policy_url], key, settings.timeout_s
            )
        self._attempts = Attempts(
            settings,
            key,
            self._executor,
            self._judge,
            self._ledger,
            self._spans,
            self._totals.add_calls,
            branching,
        )

    def _headers(self, collector: str) -> str | None:
        settings = self._settings
        return sender_headers(Role.RUNNER, collector, os.environ, token_file=settings.token_file, store=settings.store)

    def _advice(self, collector: str) -> str:
        settings = self._settings
        return token_advice(Role.RUNNER, collector, os.environ, token_file=settings.token_file, store=settings.store)

    async def execute(self) -> RunResult:
        start_s = time.monotonic()
        deliver_s = CANCELLED_DELIVERY_S
        compares = self._judge is not None and self._judge.compares
        plan = Plan(self._settings, self._ledger, self._totals, whole_groups=compares)
        try:
            await self._executor.start()
            self._report_progress()
            # Rollouts at the judge come on top, so that agents keep running; more would queue up for the judge.
            judged = self._settings.judge_concurrency if self._judge else 0
            width = self._settings.concurrency + judged
            if compares:  # each of them may keep the rest of its group waiting
                width *= self._settings.n
            width = width if self._is_streamed else max(1, min(width, self._totals.total))
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
                self._record_judge(self._judge)
            unacknowledged = await asyncio.to_thread(self._spans.close, deliver_s)
            self._ledger.close()
        if unacknowledged:
            _log.error(
                "event=verdicts_unacknowledged rollouts=%d collector=%s; once it accepts them, send them by the same command "
                "with --run %s --resume",
                unacknowledged,
                self._settings.collector,
                self._settings.run_id,
            )
        settings, totals = self._settings, self._totals
        return RunResult(
            settings.run_id,
            settings.round,
            settings.split,
            totals.total,
            dict(sorted(totals.status.items())),
            totals.mean_reward,
            totals.rewarded,
            totals.calls,
            time.monotonic() - start_s,
            unacknowledged,
            totals.resumed,
            totals.unreported,
            dict(self._judge.figures()) if self._judge else {},
        )

    def _record_judge(self, judge: Judge) -> None:
        """For `trainspan judges`; nothing depends on it."""
        if not judge.verdicts:
            return
        settings = self._settings
        figures = JudgeFigures(
            judge=judge.name,
            run_id=settings.run_id,
            round=settings.round,
            verdicts=judge.verdicts,
            figures=dict(judge.figures()),
        )
        try:
            write_judge_figures(run_folder(settings.run_id), figures)
        except OSError as error:
            _log.warning("event=judge_figures_lost judge=%s error=%s: `trainspan judges` lacks them", judge.name, error)

    async def _work(self, plan: Plan) -> None:
        while (planned := await plan.next()) is not None:
            identity = planned.identity
            verdict = await self._attempts.rollout(planned)
            self._totals.add(identity.round or 0, identity.task_id or "", verdict.status, verdict.reward)
            self._report_progress()

    def _report_progress(self) -> None:
        if self._on_progress:
            self._on_progress(self._totals.progress())

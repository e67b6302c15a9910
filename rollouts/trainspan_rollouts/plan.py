"""The rollouts of a run, in the order in which they begin: `n` of each task of a file or of standard input."""

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from trainspan_rollouts.records import RunSettings
from trainspan_rollouts.run_ledger import RunLedger
from trainspan_rollouts.task_file import Task, count_tasks, read_tasks
from trainspan_rollouts.task_stream import STDIN, TaskStream
from trainspan_rollouts.totals import Totals
from trainspan_schemas.telemetry.identity import Identity

__all__ = ["Plan", "PlannedRollout"]


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One rollout to run."""

    task: Task
    number: int
    """Of the rollout within its group, from 0."""
    identity: Identity


class Plan:
    """Hands out rollouts to several workers; rollouts that an earlier process finished are only counted.

    `totals` learns of each group before its first rollout. Raises TaskFileError for a file that is not a task file.
    """

    def __init__(self, settings: RunSettings, ledger: RunLedger, totals: Totals) -> None:
        self._settings = settings
        self._ledger = ledger
        self._totals = totals
        self._turn = asyncio.Lock()
        self._group: Iterator[PlannedRollout] = iter(())
        self._stream = TaskStream() if settings.tasks == STDIN else None
        self._file = iter(()) if self._stream else islice(read_tasks(settings.tasks, settings.split), settings.limit)
        self._streamed = 0

    @staticmethod
    def size(settings: RunSettings) -> int | None:
        """The number of rollouts; None if tasks arrive on standard input. Checks the whole file."""
        if settings.tasks == STDIN:
            return None
        tasks = count_tasks(settings.tasks, settings.split)
        return settings.n * (tasks if settings.limit is None else min(tasks, settings.limit))

    async def next(self) -> PlannedRollout | None:
        """The next rollout, as soon as its task is there; None at the end."""
        async with self._turn:
            while (planned := next(self._group, None)) is None:
                if (drawn := await self._next_task()) is None:
                    return None
                self._group = self._rollouts(*drawn)
            return planned

    async def _next_task(self) -> tuple[Task, int] | None:
        settings = self._settings
        if self._stream is None:
            task = next(self._file, None)
            return None if task is None else (task, settings.round)
        while settings.limit is None or self._streamed < settings.limit:
            if (drawn := await self._stream.next(settings.round)) is None:
                break
            if settings.split is None or drawn[0].split in (None, settings.split):
                self._streamed += 1
                return drawn
        return None

    def _rollouts(self, task: Task, round_: int) -> Iterator[PlannedRollout]:
        settings = self._settings
        split = settings.split or task.split or "train"
        self._totals.begin_group(round_, task.id, settings.n, is_new=self._stream is not None)
        for number in range(settings.n):
            if finished := self._ledger.finished(round_, task.id, number):
                self._totals.add(round_, task.id, finished.status, finished.reward, resumed=True)
                continue
            begun = self._ledger.begun(round_, task.id, number)
            rollout_id, attempt = (begun.rollout_id, begun.attempt + 1) if begun else (uuid.uuid4().hex, 0)
            identity = Identity(rollout_id, settings.run_id, task.id, attempt, round_, split)
            yield PlannedRollout(task, number, identity)

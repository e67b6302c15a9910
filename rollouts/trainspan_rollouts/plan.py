"""The rollouts of a run, in the order in which they begin: `n` of each task of a file or of standard input."""

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from trainspan_rollouts.ledger.run_ledger import RunLedger
from trainspan_rollouts.records import RunSettings
from trainspan_rollouts.task_file import Task, count_tasks, read_tasks, to_task
from trainspan_rollouts.task_stream import STDIN, TaskStream
from trainspan_rollouts.totals import Totals
from trainspan_schemas.artifacts.branches import BranchPoint, read_points
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.identity import Identity

__all__ = ["Plan", "PlannedRollout"]


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One rollout to run."""

    task: Task
    number: int
    """Of the rollout within its group, from 0."""
    identity: Identity
    point: BranchPoint | None = None
    """Where it branches from a stored rollout; the id of the identity's task then names the point too."""


class Plan:
    """Hands out rollouts to several workers; rollouts that an earlier process finished are only counted.

    `totals` learns of each group before its first rollout. Raises TaskFileError for a file that is not a task file,
    and UsageError for a task that is not what it was when earlier rollouts of it began.
    """

    def __init__(self, settings: RunSettings, ledger: RunLedger, totals: Totals, *, whole_groups: bool = False) -> None:
        """`whole_groups`: rollouts of a group that is not finished are all repeated, since their judge compares them."""
        self._whole_groups = whole_groups
        self._settings = settings
        self._ledger = ledger
        self._totals = totals
        self._turn = asyncio.Lock()
        self._group: Iterator[PlannedRollout] = iter(())
        self._stream = TaskStream() if settings.tasks == STDIN else None
        shard = settings.shard
        self._file = iter(()) if self._stream else islice(_drawn(settings), shard.index, settings.limit, shard.count)
        self._streamed = 0

    @staticmethod
    def size(settings: RunSettings) -> int | None:
        """The number of rollouts; None if tasks arrive on standard input. Checks the whole file."""
        if settings.tasks == STDIN:
            return None
        is_branched = settings.branches is not None
        tasks = (
            sum(1 for _ in read_points(settings.tasks)) if is_branched else count_tasks(settings.tasks, settings.split)
        )
        return settings.n * settings.shard.size(tasks if settings.limit is None else min(tasks, settings.limit))

    async def next(self) -> PlannedRollout | None:
        """The next rollout, as soon as its task is there; None at the end."""
        async with self._turn:
            while (planned := next(self._group, None)) is None:
                if (drawn := await self._next_task()) is None:
                    return None
                self._group = self._rollouts(*drawn)
            return planned

    async def _next_task(self) -> "_Drawn | None":
        settings = self._settings
        if self._stream is None:
            return next(self._file, None)
        while settings.limit is None or self._streamed < settings.limit:
            if (drawn := await self._stream.next(settings.round)) is None:
                break
            if settings.split is None or drawn[0].split in (None, settings.split):
                self._streamed += 1
                return *drawn, None
        return None

    def _rollouts(self, task: Task, round_: int, point: BranchPoint | None) -> Iterator[PlannedRollout]:
        settings = self._settings
        split = settings.split or task.split or "train"
        task_id = point.task_id if point else task.id
        self._totals.begin_group(round_, task_id, settings.n, is_new=self._stream is not None)
        finished_ones = [self._ledger.finished(round_, task_id, number) for number in range(settings.n)]
        is_repeated = self._whole_groups and None in finished_ones
        if not is_repeated and any(finished_ones):
            self._check_unchanged(round_, task_id, task)
        for number, finished in enumerate(finished_ones):
            if finished and not is_repeated:
                self._totals.add(round_, task_id, finished.status, finished.reward, resumed=True)
                continue
            begun = self._ledger.begun(round_, task_id, number)
            rollout_id, attempt = (begun.rollout_id, begun.attempt + 1) if begun else (uuid.uuid4().hex, 0)
            identity = Identity(rollout_id, settings.run_id, task_id, attempt, round_, split)
            yield PlannedRollout(task, number, identity, point)

    def _check_unchanged(self, round_: int, task_id: str, task: Task) -> None:
        """Raises UsageError if finished rollouts of the task had another input, answer or `meta`."""
        for number in range(self._settings.n):
            begun = self._ledger.begun(round_, task_id, number)
            if self._ledger.finished(round_, task_id, number) and begun and begun.task != task.digest():
                raise UsageError(
                    f"cannot resume: the task {task_id!r} is not what it was when its rollouts ran, and they would be compared with "
                    "the new ones; undo the change, or begin another run (another --run; a loop: without --resume)"
                )


_Drawn: TypeAlias = tuple[Task, int, BranchPoint | None]
"""A task, its round, and where its rollouts begin."""


def _drawn(settings: RunSettings) -> Iterator[_Drawn]:
    if settings.branches:
        points = enumerate(read_points(settings.tasks), 1)
        return ((to_task(f"{settings.tasks}:{line}", point.task), point.round, point) for line, point in points)
    return ((task, settings.round, None) for task in read_tasks(settings.tasks, settings.split))

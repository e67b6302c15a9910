"""The groups of a judge that compares: each waits until all of its rollouts have ended, then they are judged together."""

import asyncio
from dataclasses import dataclass, field

from trainspan_rollouts.judges.judge import Judge, Judgment, Result
from trainspan_rollouts.task_file import Task
from trainspan_schemas.telemetry.identity import Identity

__all__ = ["Groups"]

_Key = tuple[int | None, str | None]


@dataclass(slots=True)
class _Group:
    task: Task
    missing: int
    """Rollouts that have not ended for good."""
    results: dict[int, Result] = field(default_factory=dict)
    """Number of the rollout → its result."""
    judgments: dict[int, "asyncio.Future[Judgment]"] = field(default_factory=dict)


class Groups:
    """The groups in progress, of `n` rollouts each. What a retry repeats has not ended; what failed for good is not judged."""

    def __init__(self, judge: Judge, n: int) -> None:
        self._judge, self._n = judge, n
        self._open: dict[_Key, _Group] = {}
        self._judging: set[asyncio.Task[None]] = set()

    async def judge(self, task: Task, identity: Identity, number: int, result: Result) -> Judgment:
        """The verdict on this rollout, once the others of its group have ended. Raises what judging the group raises."""
        group = self._group(task, identity)
        group.results[number] = result
        judgment: asyncio.Future[Judgment] = asyncio.get_running_loop().create_future()
        group.judgments[number] = judgment
        self._count(identity, group)
        return await judgment

    def leave(self, task: Task, identity: Identity) -> None:
        """Counts a rollout that ended for good with nothing to judge."""
        self._count(identity, self._group(task, identity))

    def _group(self, task: Task, identity: Identity) -> _Group:
        return self._open.setdefault((identity.round, identity.task_id), _Group(task, self._n))

    def _count(self, identity: Identity, group: _Group) -> None:
        group.missing -= 1
        if group.missing:
            return
        del self._open[identity.round, identity.task_id]
        if group.results:
            judging = asyncio.create_task(self._judge_all(group))
            self._judging.add(judging)
            judging.add_done_callback(self._judging.discard)

    async def _judge_all(self, group: _Group) -> None:
        numbers = sorted(group.results)
        try:
            judgments = await self._judge.judge_group(group.task.for_judge(), [group.results[n] for n in numbers])
        except Exception as error:  # noqa: BLE001 - the rollouts that wait for it get it
            for waiting in group.judgments.values():
                if not waiting.done():
                    waiting.set_exception(error)
            return
        for number, judgment in zip(numbers, judgments, strict=True):
            if not group.judgments[number].done():  # canceled
                group.judgments[number].set_result(judgment)

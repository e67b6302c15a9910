"""The tasks that a run draws from: one split of a task file of any kind that `trainspan rollout` reads."""

import json
import random
from pathlib import Path

from trainspan_rollouts.tasks import Task, read_tasks
from trainspan_schemas.errors import TaskFileError
from trainspan_schemas.identity import Split

__all__ = ["TaskPool"]


class TaskPool:
    """The tasks of `split`, counted once; a task without a split is for training. Memory does not grow with the file.

    Raises TaskFileError, with the line's (or row's) number, at the first that is no task.
    """

    def __init__(self, path: Path, split: Split) -> None:
        self._path, self._split = path, split
        self._count = sum(self._is_mine(task) for task in read_tasks(path))

    def __len__(self) -> int:
        return self._count

    def draw(self, count: int, seed: str) -> list[str]:
        """`count` tasks (all, if fewer) as JSON lines, drawn without replacement by `seed`; the same on every call."""
        drawn = random.Random(seed).sample(range(self._count), min(count, self._count))
        wanted = set(drawn)
        mine = (task for task in read_tasks(self._path) if self._is_mine(task))
        lines = {place: _line(task) for place, task in enumerate(mine) if place in wanted}
        if len(lines) < len(wanted):
            raise TaskFileError(f"{self._path} has fewer tasks than when the run began")
        return [lines[place] for place in drawn]

    def _is_mine(self, task: Task) -> bool:
        return (task.split or "train") == self._split


def _line(task: Task) -> str:
    return json.dumps(
        {name: value for name, value in task.for_judge().items() if value is not None}, ensure_ascii=False
    )

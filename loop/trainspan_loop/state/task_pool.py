"""The tasks that a run draws from, in task files of any format that `trainspan rollout` reads."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from trainspan_rollouts.task_file import Task, count_tasks, read_tasks
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, TaskFileError
from trainspan_schemas.telemetry.identity import Split

__all__ = ["LoopTasks", "TaskPool"]


class TaskPool:
    """The tasks of `split` in one file, counted once; a task without a split is for training.

    Memory does not grow with the file. Raises TaskFileError with the number of the first line (or row) that is not a task.
    """

    def __init__(self, path: Path, split: Split) -> None:
        self._path, self._split = path, split
        self._count = sum(self._is_mine(task) for task in read_tasks(path))

    def __len__(self) -> int:
        return self._count

    def draw(self, count: int, seed: str) -> list[str]:
        """Draws `count` tasks (all, if fewer) as JSON lines, without replacement by `seed`; the same on every call."""
        drawn = random.Random(seed).sample(range(self._count), min(count, self._count))
        wanted = set(drawn)
        mine = (task for task in read_tasks(self._path) if self._is_mine(task))
        lines = {index: _line(task) for index, task in enumerate(mine) if index in wanted}
        if len(lines) < len(wanted):
            raise TaskFileError(f"{self._path} has fewer tasks than when the run began")
        return [lines[index] for index in drawn]

    def _is_mine(self, task: Task) -> bool:
        return (task.split or "train") == self._split


@dataclass(frozen=True, slots=True)
class LoopTasks:
    """The tasks named by a loop's settings: for training, for validation, and for the hard probe.

    Without a target the loop runs no agent: it learns from those that others run, and only validations have tasks.
    """

    train: TaskPool | None
    val: TaskPool | None
    probe: TaskPool | None
    trial: TaskPool | None
    """The tasks on which each new version is compared with the one before."""

    @classmethod
    def open(cls, settings: Settings) -> "LoopTasks":
        """Opens the files and checks every task. Raises ConfigError, TaskFileError."""
        loop, tasks_file = settings.loop, settings.rollouts.tasks
        if loop.target is None and loop.val_target is None:
            return cls(None, None, None, None)
        if not tasks_file:
            raise ConfigError(
                "[loop] target (or val_target) needs [rollouts] tasks in trainspan.toml: the tasks of the agent"
            )
        path = Path(tasks_file)
        count_tasks(path)
        train = TaskPool(path, "train") if loop.target is not None else None
        if train is not None and not train:
            raise ConfigError(f"{tasks_file} has no task of split train")
        probe = TaskPool(Path(loop.probe_tasks), "val") if loop.probe_tasks else None
        trial = TaskPool(Path(loop.trial_tasks), "val") if loop.trial_tasks else None
        return cls(train, TaskPool(path, "val"), probe, trial)


def _line(task: Task) -> str:
    return json.dumps(
        {name: value for name, value in task.for_judge().items() if value is not None}, ensure_ascii=False
    )

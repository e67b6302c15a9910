"""Feeds a running `trainspan rollout --tasks -` with tasks, so that it always has rollouts to run, and counts what it did."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import IO

from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import TaskPool
from trainspan_schemas.artifacts.run_records import RolloutFigures
from trainspan_schemas.command_events import Progress
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import TaskFileError

__all__ = ["TaskFeed", "drawn_tasks", "draws"]

_STATE = "draws.json"


def draws(folder: RunFolder) -> int:
    """The number of draws of tasks that were begun, in this process or an earlier one."""
    return int(folder.read(_STATE).get("draws", 0))


def drawn_tasks(settings: Settings, tasks: TaskPool, folder: RunFolder) -> Iterator[str]:
    """Lines of tasks for the runner, draw after draw, without end; a draw's number is the `round` of its tasks.

    A draw is recorded before its first task is used: no number occurs twice in a run, even if the loop is killed.
    """
    draw = draws(folder)
    while True:
        draw += 1
        folder.write(_STATE, {"draws": draw})
        for line in tasks.draw(settings.loop.tasks_per_round, f"{settings.loop.seed}-{draw}"):
            yield json.dumps({**json.loads(line), "round": draw}, ensure_ascii=False) + "\n"


class TaskFeed:
    """The tasks of one runner. Thread-safe: the runner's events, its input and the loop are three threads.

    A task is given out if fewer rollouts are open than the runner can run at once, and if fewer than `max_ready` complete
    groups wait for training.
    """

    def __init__(self, settings: Settings, lines: Iterator[str], on_progress: Callable[[Progress], None]) -> None:
        loop, rollouts = settings.loop, settings.rollouts
        self._n = rollouts.n
        self._batch = loop.tasks_per_round * rollouts.n
        self._max_open = rollouts.concurrency + (rollouts.judge_concurrency if rollouts.judge else 0) + rollouts.n
        self._max_ready = max(1, loop.overlap) * loop.tasks_per_round
        self._lines = lines
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._given = 0
        self._closed = False
        self._failure: TaskFileError | OSError | None = None
        self._now = Progress(done=0, failed=0, total=0)
        self._before = self._now
        """The progress when the last batch was cut."""

    def write(self, pipe: IO[str]) -> None:
        """Writes tasks to the runner until `close`, then ends its input."""
        with contextlib.suppress(BrokenPipeError), pipe:
            while (line := self._next_line()) is not None:
                pipe.write(line)
                pipe.flush()

    def _next_line(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room())
            if self._closed:
                return None
            self._given += 1
        try:
            return next(self._lines)
        except (TaskFileError, OSError) as error:  # of the task file, or of the record of draws
            self._failure = error
            self.close()
            return None

    def close(self) -> None:
        """Gives out no more tasks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def progress(self, progress: Progress) -> None:
        """Takes the runner's progress."""
        with self._changed:
            self._now = progress
            done = progress.done - self._before.done
            failed = sum(count for name, count in self._status().items() if name != "ok")
            rewarded, mean_reward = self._rewards()
            self._changed.notify_all()
        self._on_progress(Progress(done, failed, self._batch, mean_reward, rewarded=rewarded))

    def wait(self, groups: int, timeout_s: float) -> bool:
        """Waits until so many complete groups are ready; returns whether they are.

        Raises the TaskFileError or OSError that ended the tasks.
        """
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._ready() >= groups, timeout_s)
        if self._failure is not None:
            raise self._failure
        return is_ready

    def cut_round(self) -> RolloutFigures:
        """Takes all complete groups as a batch; returns its figures, as in the result of `trainspan rollout`."""
        with self._changed:
            now, before = self._now, self._before
            rewarded, mean_reward = self._rewards()
            figures: RolloutFigures = {
                "total": now.done - before.done,
                "groups": now.groups - before.groups,
                "status": self._status(),
                "calls": now.calls - before.calls,
                "rewarded": rewarded,
                "mean_reward": mean_reward,
            }
            self._before = now
            self._changed.notify_all()
        return figures

    @property
    def done(self) -> int:
        """Rollouts that are done."""
        return self._now.done

    @property
    def oldest_round(self) -> int | None:
        """The first draw with a task of which some rollouts are not done; None if there is none."""
        return self._now.oldest_round

    def _ready(self) -> int:
        return self._now.groups - self._before.groups

    def _has_room(self) -> bool:
        return self._given * self._n - self._now.done < self._max_open and self._ready() < self._max_ready

    def _status(self) -> dict[str, int]:
        """Final status → rollouts since the last batch."""
        now, before = self._now.status, self._before.status
        return {name: more for name, count in now.items() if (more := count - before.get(name, 0))}

    def _rewards(self) -> tuple[int, float | None]:
        """Number of rewards and their mean since the last batch."""
        rewarded = self._now.rewarded - self._before.rewarded
        total = _sum(self._now) - _sum(self._before)
        return rewarded, total / rewarded if rewarded else None


def _sum(progress: Progress) -> float:
    return (progress.mean_reward or 0.0) * progress.rewarded

"""Progress output of a run: JSON lines or a bar."""

import sys
import time
from typing import Final

from trainspan_schemas.command_events import Progress, event_line

__all__ = ["JsonProgress", "ProgressBar"]

_PROGRESS_INTERVAL_S: Final = 0.5


class JsonProgress:
    """Prints at most two lines per second, or with `every` a line for each rollout."""

    def __init__(self, *, every: bool) -> None:
        self._interval_s = 0.0 if every else _PROGRESS_INTERVAL_S
        self._next_s = 0.0

    def __call__(self, progress: "Progress") -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or progress.done == progress.total:
            self._next_s = now_s + self._interval_s
            print(event_line(progress), flush=True)


class ProgressBar:
    """A progress bar on stderr with done, failed and mean reward."""

    def __enter__(self) -> "ProgressBar":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("rollouts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("rollouts", total=None, note="")
        return self

    def __call__(self, progress: "Progress") -> None:
        if not self._progress.live.is_started:  # an unusable target is reported without a bar
            self._progress.start()
        reward = "no reward yet" if progress.mean_reward is None else f"mean reward {progress.mean_reward:.3f}"
        self._progress.update(
            self._task, completed=progress.done, total=progress.total, note=f"{progress.failed} failed, {reward}"
        )

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

"""Times the stages of a round."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainspan_schemas.command_events import STAGES, TrainingProgress

__all__ = ["StageClock"]


class StageClock:
    """Seconds by stage, of one round; calls `on_progress` when a stage begins."""

    def __init__(self, on_progress: Callable[[TrainingProgress], None]) -> None:
        self._on_progress = on_progress
        self._round = 0
        self.seconds: dict[str, float] = {}

    def restart(self, round_: int, *, wait: float) -> None:
        """Begins a round, after waiting for its dataset."""
        self._round = round_
        self.seconds = {"wait": wait}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        if stage in STAGES:
            self._on_progress(TrainingProgress(self._round, stage))
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started

"""Times the stages of a round."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StageClock"]


class StageClock:
    """Seconds by stage, of one round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def restart(self, *, wait: float) -> None:
        """Begins a round, after waiting for its dataset."""
        self.seconds = {"wait": wait}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started

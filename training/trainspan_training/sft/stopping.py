"""How a job ends: finished, or stopped by a signal from which the same job continues."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SftOutcome", "StopSignal", "Stopped"]


@dataclass(frozen=True, slots=True)
class SftOutcome:
    """How a job ended."""

    out: Path
    steps: int
    """Of the whole job; 0 if it was complete before."""
    done: int
    """Those made so far."""
    signal: int | None = None
    """The signal that stopped it."""
    manifest: dict[str, Any] | None = None
    """The finished model's manifest."""


class StopSignal:
    """SIGINT or SIGTERM: outside of `working` it ends the job at once, within it after the step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._patient = False

    def on_signal(self, number: int, _: object) -> None:
        again, self.signal = self.signal is not None, number
        if again or not self._patient:
            raise Stopped

    @contextmanager
    def working(self) -> Iterator[None]:
        self._patient = True
        try:
            yield
        finally:
            self._patient = False


class Stopped(BaseException):
    """Raised in the main thread by a signal."""

"""SIGINT and SIGTERM while a job runs."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StopSignal", "Stopped"]


class StopSignal:
    """A signal ends the job at once outside of `working`, and after the step within it; a second one at once."""

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

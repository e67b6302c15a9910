"""SIGTERM, SIGINT and SIGHUP as a flag that the main thread waits for."""

import contextlib
import os
import signal
from collections.abc import Iterator
from enum import Enum
from types import FrameType

__all__ = ["SignalAction", "Stop", "stop_signal"]


class SignalAction(Enum):
    STOP = "to stop"
    RELOAD = "to reload"


class Stop:
    """A flag that any thread can set, and a signal in any thread: a pipe that the main thread reads."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.asked = False
        """Whether a signal set the flag: then it stays set."""

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full, so it is set
            os.write(self.write_end, bytes(1))

    def wait(self) -> SignalAction:
        if not self.asked:
            number = os.read(self._read, 1)[0]  # the interpreter writes a signal's number
            if number == signal.SIGHUP:
                return SignalAction.RELOAD
            self.asked = number != 0
        return SignalAction.STOP


@contextlib.contextmanager
def stop_signal() -> Iterator[Stop]:
    """Turns SIGTERM, SIGINT and SIGHUP into a flag during the block, draining included."""
    stop = Stop()
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    wakeup_before = signal.set_wakeup_fd(stop.write_end, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The interpreter has already written the signal to the pipe."""

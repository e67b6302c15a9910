"""Child processes: started so that signals meant for the collector alone do not reach them."""

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["signals_blocked"]


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """For what is started in the block: a terminal and systemd send them to every process of the collector."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

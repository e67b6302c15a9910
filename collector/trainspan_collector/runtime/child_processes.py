"""Starts child processes so that signals meant only for the collector do not reach them."""

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["signals_blocked"]


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks signals in processes started in the block: a terminal and systemd send them to all of the collector's processes."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""SIGTERM in a program that has no handler of its own: its spans are sent, then it dies of the signal.

A handler in Python runs when the main thread comes back to Python. A thread that is about to wait in C does not come
back: a worker of `multiprocessing.Pool` whose signal arrives just before `sem_wait` would wait for ever, and so would
the parent that joins it. The interpreter writes each signal to its wake-up descriptor at once, so a thread reads that;
the handler does the same work in programs that use the descriptor themselves (asyncio's signal handlers).
"""

import ctypes
import functools
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from trainspan._guard import guarded

__all__ = ["watch"]

_PATIENCE_S = 5.0
"""More than `end` takes."""


class _Watch:
    """What this process has installed."""

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None
        """Sends what is queued, in bounded time; called in the main thread or in a thread of its own."""
        self.pipe: tuple[int, int] | None = None
        """Read end and write end; the write end is the wake-up descriptor unless the program sets one of its own."""
        self.dying = threading.Lock()
        self.dying_thread: int | None = None


_watch = _Watch()
_set_wakeup_fd = signal.set_wakeup_fd


def watch(end: Callable[[], None]) -> None:
    """Calls `end` on SIGTERM, then lets the process die of it; nothing if the program or its parent chose otherwise.

    Must be called in the main thread; raises ValueError elsewhere.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    _watch.end = end
    signal.signal(signal.SIGTERM, _on_sigterm)
    _open()
    signal.set_wakeup_fd = set_wakeup_fd
    mask = threading.local()

    def before_fork() -> None:
        """Holds SIGTERM back: a child that it reaches before it has a pipe of its own would write to its parent's."""
        mask.earlier = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.earlier)

    def after_fork_in_child() -> None:
        _reopen()
        after_fork()

    os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child)


@functools.wraps(_set_wakeup_fd)
def set_wakeup_fd(fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
    """As `signal.set_wakeup_fd`; our descriptor is never shown, and is in force while the program has none."""
    ours = _watch.pipe[1] if _watch.pipe else -1
    if fd == -1 and ours != -1:
        earlier = _set_wakeup_fd(ours, warn_on_full_buffer=False)
    else:
        earlier = _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
    return -1 if earlier == ours else earlier


def _open() -> None:
    """Makes the pipe and the thread that reads it, unless the program has set a wake-up descriptor before."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier = _set_wakeup_fd(writer, warn_on_full_buffer=False)
    if earlier != -1:
        _set_wakeup_fd(earlier)
        os.close(reader)
        os.close(writer)
        return
    _watch.pipe = (reader, writer)
    threading.Thread(target=_read, args=(reader,), name="trainspan-sigterm", daemon=True).start()


@guarded
def _reopen() -> None:
    """In a forked child, which has its parent's pipe and no thread that reads it."""
    _watch.dying, _watch.dying_thread = threading.Lock(), None
    if _watch.pipe is None:
        return
    reader, writer = _watch.pipe
    _watch.pipe = None
    current = _set_wakeup_fd(-1)
    if current == writer:
        _open()
    else:
        _set_wakeup_fd(current)
    os.close(reader)
    os.close(writer)


def _read(reader: int) -> None:
    while number := os.read(reader, 1):
        if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            _die()


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    _die()


def _die() -> None:
    """The main thread waits here while the other one does it; a second signal within the first changes nothing."""
    if not _watch.dying.acquire(blocking=False):
        if _watch.dying_thread != threading.get_ident():
            _watch.dying.acquire(timeout=_PATIENCE_S)
        return
    _watch.dying_thread = threading.get_ident()
    guarded(_watch.end)()
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL; Python's own may be called in the main thread only
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

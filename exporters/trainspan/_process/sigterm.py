"""Handles SIGTERM in a program without its own handler: sends its spans, then lets the signal kill it.

A Python handler runs when the main thread returns to Python. A thread that is about to wait in C does not return: a
worker of `multiprocessing.Pool` that is signaled just before `sem_wait` would wait forever, and so would the parent
that joins it. The interpreter writes each signal to its wakeup descriptor at once, so a thread reads that; the handler
does the same in programs that use the descriptor themselves (asyncio's signal handlers).

The main thread may hold a lock that the end needs: that of an export, of a span. It is not stopped there.
"""

import contextlib
import ctypes
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from trainspan._guard import guarded

__all__ = ["held", "watch"]

_PATIENCE_S = 5.0
"""Longer than `end` takes."""


class _Watch:
    """The handlers installed in this process."""

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None
        """Sends everything queued, in bounded time; called in the main thread or the reading thread."""
        self.pipe: tuple[int, int] | None = None
        """Read end and write end; the write end is the wakeup descriptor unless the program sets its own."""
        self.dying = threading.Lock()
        self.dying_thread: int | None = None
        self.is_held = False
        self.came_while_held = False


_watch = _Watch()
_set_wakeup_fd = signal.set_wakeup_fd


def watch(end: Callable[[], None]) -> None:
    """Calls `end` on SIGTERM, then lets it kill the process; does nothing if SIGTERM is already handled or ignored.

    Must be called in the main thread; otherwise raises ValueError.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    _watch.end = end
    signal.signal(signal.SIGTERM, _on_sigterm)
    _open()
    signal.set_wakeup_fd = set_wakeup_fd
    mask = threading.local()

    def before_fork() -> None:
        """Blocks SIGTERM: a child that gets it before it has its own pipe would write to its parent's."""
        mask.earlier = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.earlier)

    def after_fork_in_child() -> None:
        _reopen()
        after_fork()

    os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child)


@functools.wraps(_set_wakeup_fd)
def set_wakeup_fd(fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
    """Replaces `signal.set_wakeup_fd`; never returns our descriptor, which is active while the program sets none."""
    ours = _watch.pipe[1] if _watch.pipe else -1
    if fd == -1 and ours != -1:
        earlier = _set_wakeup_fd(ours, warn_on_full_buffer=False)
    else:
        earlier = _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
    return -1 if earlier == ours else earlier


def _open() -> None:
    """Creates the pipe and its reading thread, unless the program has set a wakeup descriptor already."""
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
    """Replaces the parent's pipe in a forked child, where no thread reads it."""
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


def _on_sigterm(_number: int, frame: FrameType | None) -> None:
    if not _watch.is_held and _in_telemetry(frame):
        threading.Thread(target=_die, name="trainspan-sigterm", daemon=True).start()
    else:
        _die()


def _in_telemetry(frame: FrameType | None) -> bool:
    """Whether the interrupted thread is in code of OpenTelemetry or of this package."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in {"opentelemetry", "trainspan"}:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Holds SIGTERM back while the main thread sends everything at the program's end; then the signal kills it as ever.

    From Python 3.12 on, no thread can be started there to do it.
    """
    _watch.is_held = True
    try:
        yield
    finally:
        _watch.is_held = False
        _wait()
        if _watch.came_while_held:
            _kill()


def _wait() -> None:
    """If another thread is ending the process, waits for that: an exit at the same time must not hide the signal."""
    if _watch.dying.locked() and _watch.dying_thread != threading.get_ident():
        _watch.dying.acquire(timeout=_PATIENCE_S)


def _die() -> None:
    """Ends and kills the process. One thread does it while others wait here; a second signal has no effect."""
    if _watch.is_held:
        _watch.came_while_held = True
        return
    if not _watch.dying.acquire(blocking=False):
        _wait()
        return
    _watch.dying_thread = threading.get_ident()
    guarded(_watch.end)()
    _kill()


def _kill() -> None:
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL; `signal.signal` works in the main thread only
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

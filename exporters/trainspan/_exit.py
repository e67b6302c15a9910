"""The ways a process ends, each with its spans sent: normally, by `sys.exit`, an exception, `os._exit`, SIGTERM; and fork.

Not seen: SIGKILL, and the code of a `raise SystemExit(n)` outside of the program's main module (`_system_exit`).
"""

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from trainspan import _delivery, _process, _system_exit
from trainspan._guard import guarded
from trainspan_schemas.status import RolloutStatus

__all__ = ["watch_exits"]

_PATIENCE_S = 2.5
"""How long an abrupt end waits for the flush, which takes its time in a thread of its own."""


def watch_exits() -> None:
    """Installs all of it; each part by itself."""
    atexit.register(_at_exit)
    _system_exit.watch()
    _watch_os_exit()
    _watch_sigterm()
    os.register_at_fork(
        before=guarded(_delivery.before_fork),
        after_in_parent=guarded(_delivery.after_fork_in_parent),
        after_in_child=_after_fork,
    )


@guarded
def _at_exit() -> None:
    status, error = _outcome()
    _process.end(status, error)
    _delivery.flush()
    _delivery.report_loss()


def _outcome() -> tuple[RolloutStatus, BaseException | None]:
    """How the main thread ended."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and _left_the_program(error):
        return ("cancelled" if isinstance(error, KeyboardInterrupt) else "agent_error"), error
    return ("agent_error" if _system_exit.failed() else "ok"), None


def _left_the_program(error: BaseException) -> bool:
    """Whether the interpreter printed it, as against a console inside the program: its traceback starts at the bottom."""
    return error.__traceback__ is not None and error.__traceback__.tb_frame.f_back is None


@guarded
def _watch_os_exit() -> None:
    exit_now = os._exit

    def leave(status: int) -> NoReturn:
        _end_abruptly("ok" if status == 0 else "agent_error")
        exit_now(status)

    leave.__name__ = leave.__qualname__ = "_exit"
    leave.__doc__ = exit_now.__doc__
    os._exit = leave


@guarded
def _watch_sigterm() -> None:
    """Only where nobody else handles it; the process still dies of the signal."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def on_sigterm(number: int, _frame: FrameType | None) -> None:
        _end_abruptly("cancelled")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_sigterm)


@guarded
def _end_abruptly(status: RolloutStatus) -> None:
    """In a thread: the caller may hold the very lock that ending a span or exporting needs."""

    def end() -> None:
        _process.end(status)
        _delivery.flush()
        _delivery.report_loss()

    thread = threading.Thread(target=guarded(end), name="trainspan-end", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)


def _after_fork() -> None:
    for step in (_delivery.forget, _system_exit.forget, _process.begin_forked):
        guarded(step)()

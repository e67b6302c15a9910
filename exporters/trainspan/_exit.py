"""The ways a process ends, each with its spans sent: normally, by `sys.exit`, an exception, `os._exit`, SIGTERM; and fork.

Not seen: SIGKILL, and the exit code of a bare `raise SystemExit(n)`, which no hook of the interpreter tells.
"""

import atexit
import os
import signal
import sys
import threading
from opcode import opname
from types import FrameType
from typing import Any, NoReturn

from trainspan import _delivery, _process
from trainspan._guard import guarded
from trainspan_schemas.status import RolloutStatus

__all__ = ["watch_exits"]

_PATIENCE_S = 2.5
"""How long an abrupt end waits for the flush, which takes its time in a thread of its own."""


class _LastExit:
    """The latest call of `sys.exit` in the main thread."""

    code: Any = None
    bottom: FrameType | None = None
    """The program's outermost frame."""


def watch_exits() -> None:
    """Installs all of it; each part by itself."""
    atexit.register(_at_exit)
    _watch_sys_exit()
    _watch_os_exit()
    _watch_sigterm()
    os.register_at_fork(after_in_child=_after_fork)


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
    bottom = _LastExit.bottom
    if bottom is not None and _LastExit.code not in (None, 0) and not _has_returned(bottom):
        return "agent_error", None
    return "ok", None


def _left_the_program(error: BaseException) -> bool:
    """Whether the interpreter printed it, as against a console inside the program: its traceback starts at the bottom."""
    return error.__traceback__ is not None and error.__traceback__.tb_frame.f_back is None


def _has_returned(frame: FrameType) -> bool:
    """Whether a frame that has ended did so by a return. A `sys.exit` that was caught lets the program go on to one."""
    return opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


@guarded
def _watch_sys_exit() -> None:
    def leave(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            bottom = sys._getframe()
            while bottom.f_back is not None:
                bottom = bottom.f_back
            _LastExit.code, _LastExit.bottom = status, bottom
        raise SystemExit(status) if status is not None else SystemExit()

    leave.__name__ = leave.__qualname__ = "exit"
    leave.__doc__ = sys.exit.__doc__
    sys.exit = leave


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


@guarded
def _after_fork() -> None:
    _LastExit.bottom = None
    _delivery.forget()
    _process.begin_forked()

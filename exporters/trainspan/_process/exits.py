"""Sends all spans when a process ends: normally, by an exception, `sys.exit`, `os._exit`, `exec` or SIGTERM.

Not detected: SIGKILL, and the code of a `raise SystemExit(n)` outside the program's main module (`system_exit`).
"""

import atexit
import functools
import os
import sys
import threading
from typing import Any, NoReturn

from trainspan._calls import client_capture
from trainspan._guard import guarded, hidden
from trainspan._process import delivery, process_span, sigterm, system_exit
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["watch_exits"]

_PATIENCE_S = 2.5
"""How long an abrupt end waits for the flush, which runs in its own thread."""


def watch_exits() -> None:
    """Installs every part independently."""
    atexit.register(_at_exit)
    system_exit.watch()
    _watch_os_exit()
    _watch_exec()
    _watch_sigterm()
    os.register_at_fork(
        before=guarded(delivery.before_fork),
        after_in_parent=guarded(delivery.after_fork_in_parent),
        after_in_child=_after_fork,
    )


@guarded
def _at_exit() -> None:
    status, error = _outcome()
    with sigterm.held():
        process_span.end(status, error)
        delivery.flush()
        delivery.report_loss()


def _outcome() -> tuple[RolloutStatus, BaseException | None]:
    """Returns how the main thread ended."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and _left_the_program(error):
        return ("cancelled" if isinstance(error, KeyboardInterrupt) else "agent_error"), error
    return ("agent_error" if system_exit.failed() else "ok"), None


def _left_the_program(error: BaseException) -> bool:
    """Whether the interpreter printed it, not a console in the program: its traceback starts at the bottom frame."""
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
def _watch_exec() -> None:
    """Wraps `os.execv` and `os.execve`, which every `os.exec*` function calls."""
    execv, execve = os.execv, os.execve

    @functools.wraps(execv)
    def replace(path: Any, argv: Any, /) -> NoReturn:
        with hidden:
            if _fails(path):
                execv(path, argv)
            replace_with_environment(path, argv, os.environ)

    @functools.wraps(execve)
    def replace_with_environment(path: Any, argv: Any, env: Any) -> NoReturn:
        with hidden:
            if _fails(path):
                execve(path, argv, env)
            following = dict(env)
            _before_exec(following)
            try:
                execve(path, argv, following)
            finally:  # it failed
                _after_failed_exec()

    os.execv, os.execve = replace, replace_with_environment


def _fails(path: Any) -> bool:
    """Whether exec cannot run `path`: `os.execvp` tries each folder of PATH before the right one."""
    return isinstance(path, (str, bytes)) and not os.access(path, os.X_OK)


@guarded
def _before_exec(environ: dict[str, str]) -> None:
    process_span.replaced(environ)
    delivery.flush()


@guarded
def _after_failed_exec() -> None:
    process_span.resume()
    delivery.resume()


@guarded
def _watch_sigterm() -> None:
    sigterm.watch(lambda: _end_abruptly("cancelled"))


@guarded
def _end_abruptly(status: RolloutStatus) -> None:
    """Ends in a new thread: the caller may hold the very lock that ending a span or exporting needs."""

    def end() -> None:
        process_span.end(status)
        delivery.flush()
        delivery.report_loss()

    thread = threading.Thread(target=guarded(end), name="trainspan-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # from Python 3.12 on, while the interpreter ends: no other thread runs
        end()
    else:
        thread.join(_PATIENCE_S)


def _after_fork() -> None:
    for step in (delivery.forget, client_capture.forget, system_exit.forget, process_span.begin_forked):
        guarded(step)()

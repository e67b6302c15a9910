"""Carries the current context into threads and thread pools, so that their spans and calls belong to the same rollout.

A thread starts in the context in which it was started, a task of a pool in that in which it was submitted. Carried are
OpenTelemetry's context and the last call alone: the program's own context variables are as without us, and so are tracebacks.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, Final

import wrapt
from opentelemetry import context
from opentelemetry.context import Context

from trainspan._guard import Args, Kwargs, guarded, hidden
from trainspan._rollout.last_call import note, noted, noting
from trainspan._rollout.suspension import separate_flow, switch_carried

__all__ = ["watch_threads"]

_CONTEXT: Final = "_trainspan_context"
"""Attribute of a thread between its start and its first step."""


def watch_threads() -> None:
    """Wraps `threading.Thread`, with its subclasses, and `concurrent.futures.ThreadPoolExecutor`."""
    wrapt.wrap_function_wrapper(threading.Thread, "start", _start)
    # The first frame of a thread, below those that its traceback shows; `run` is overridden by subclasses.
    wrapt.wrap_function_wrapper(threading.Thread, "_bootstrap", _bootstrap)
    wrapt.wrap_function_wrapper(futures.ThreadPoolExecutor, "submit", _submit)


def _start(wrapped: Callable[..., Any], thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    _keep(thread)
    with hidden:
        return wrapped(*args, **kwargs)


def _bootstrap(wrapped: Callable[..., Any], thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    _enter(thread)
    with hidden:
        return wrapped(*args, **kwargs)


def _submit(wrapped: Callable[..., Any], _pool: futures.Executor, args: Args, kwargs: Kwargs) -> Any:
    submitted = _in_context(args[0]) if args else None
    with hidden:
        return wrapped(submitted, *args[1:], **kwargs) if submitted else wrapped(*args, **kwargs)


@guarded
def _keep(thread: threading.Thread) -> None:
    vars(thread)[_CONTEXT] = context.get_current(), noted()


@guarded
def _enter(thread: threading.Thread) -> None:
    carried = vars(thread).pop(_CONTEXT, None)
    if carried is not None:
        context.attach(carried[0])
        note(carried[1])


@guarded
def _in_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` to be called in the current context, whichever thread calls it."""
    caller_context, call_before = context.get_current(), noted()
    switch_carried(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        token = _attach(caller_context)
        try:
            with hidden, separate_flow(), noting(call_before):
                return function(*args, **kwargs)
        finally:
            if token is not None:
                context.detach(token)

    return call


@guarded
def _attach(carried: Context) -> Any:
    return context.attach(carried)

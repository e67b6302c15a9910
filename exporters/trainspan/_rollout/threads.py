"""Carries the current context into threads and thread pools, so that their spans and calls belong to the same rollout.

A thread starts in the context in which it was started, a task of a pool in that in which it was submitted. Carried are
OpenTelemetry's context and the last call alone: the program's own context variables are as without us, and so are tracebacks.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from types import ModuleType
from typing import Any, Final

import wrapt
from opentelemetry import context
from opentelemetry.context import Context

from trainspan._guard import Args, Kwargs, guarded, hidden
from trainspan._rollout.last_call import note, noted, noting
from trainspan._rollout.suspension import separate_flow, switch_carried

__all__ = ["METHODS_OF_POOLS", "watch_threads", "with_function"]

METHODS_OF_POOLS: Final = ("apply_async", "_map_async", "imap", "imap_unordered")
"""Of `multiprocessing.pool.Pool`: those that submit, also for its other methods."""

_CONTEXT: Final = "_trainspan_context"
"""Attribute of a thread between its start and its first step."""


def watch_threads() -> None:
    """Wraps `threading.Thread`, with its subclasses, `concurrent.futures.ThreadPoolExecutor` and `multiprocessing.pool.ThreadPool`."""
    wrapt.wrap_function_wrapper(threading.Thread, "start", _start)
    # The first frame of a thread, below those that its traceback shows; `run` is overridden by subclasses.
    wrapt.wrap_function_wrapper(threading.Thread, "_bootstrap", _bootstrap)
    wrapt.wrap_function_wrapper(futures.ThreadPoolExecutor, "submit", _submit)
    wrapt.register_post_import_hook(guarded(_wrap_thread_pool), "multiprocessing.pool")


def _wrap_thread_pool(module: ModuleType) -> None:
    for name in METHODS_OF_POOLS:
        wrapt.wrap_function_wrapper(module.ThreadPool, name, _submit)


def _start(wrapped: Callable[..., Any], thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    _keep(thread)
    with hidden:
        return wrapped(*args, **kwargs)


def _bootstrap(wrapped: Callable[..., Any], thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    _enter(thread)
    with hidden:
        return wrapped(*args, **kwargs)


def _submit(wrapped: Callable[..., Any], _pool: futures.Executor, args: Args, kwargs: Kwargs) -> Any:
    args, kwargs = with_function(_in_context, args, kwargs)
    with hidden:
        return wrapped(*args, **kwargs)


def with_function(
    change: Callable[[Callable[..., Any]], Callable[..., Any] | None], args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Returns a pool's arguments with their function, the first one or `func`, changed; as they are if that is None."""
    function = args[0] if args else kwargs.get("func")
    changed = change(function) if callable(function) else None
    if changed is None:
        return args, kwargs
    return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "func": changed})


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

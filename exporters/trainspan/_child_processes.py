"""The rollout of the processes that this one starts, and of the tasks that it gives to process pools.

A program gets its rollout in its environment, a child of `multiprocessing` with its arguments, and a task of a pool with its
function: the pool's processes outlast the rollout in which they were started. A forked child has its parent's context.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any, Final

import wrapt
from opentelemetry import context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trainspan._guard import Args, Kwargs, guarded, hidden, refuse
from trainspan._rollout.scope import Scope, current_scope, process_scope, set_process_scope
from trainspan._rollout.threads import METHODS_OF_POOLS, with_function
from trainspan._rollout_block import start_span
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import (
    ENV_BAGGAGE,
    ENV_TRACEPARENT,
    ENV_TRACESTATE,
    Identity,
    TraceParent,
    parse_baggage,
    strip_identity,
)

__all__ = ["PROCESS_SPAN_NAME", "export", "from_environment", "watch_children"]

PROCESS_SPAN_NAME: Final = "trainspan.process"
"""A process's part in a rollout that another process began."""
_ROLLOUT: Final = "_trainspan_rollout"
"""Attribute of a `multiprocessing.Process` while it starts."""
_ENV: Final = 10
"""Position of the environment among the arguments of `subprocess.Popen`."""


def from_environment(environ: Mapping[str, str]) -> tuple[Context, Identity | None, bool]:
    """Returns the context from the parent process, the identity in it, and whether that identity is provisional.

    Identity is not added to the context's baggage.
    """
    carrier = {
        "traceparent": environ.get(ENV_TRACEPARENT, ""),
        "tracestate": environ.get(ENV_TRACESTATE, ""),
        "baggage": strip_identity(environ.get(ENV_BAGGAGE, "")),
    }
    base = TraceContextTextMapPropagator().extract(carrier, Context())
    base = W3CBaggagePropagator().extract(carrier, base)
    members = parse_baggage(environ.get(ENV_BAGGAGE, ""))
    try:
        identity = Identity.from_attributes(members)
    except InvalidRecordError as error:
        refuse("malformed_identity", f"{ENV_BAGGAGE} of the environment is not used: {error}")
        identity = None
    return base, identity, members.get(keys.ROLLOUT_BOUNDARY) == "process"


def export(scope: Scope, environ: MutableMapping[str, str]) -> None:
    """Sets the current span, if it is in the rollout's trace, as the parent of a child, and passes on the rollout's identity."""
    span_context, current = scope.span.get_span_context(), trace.get_current_span().get_span_context()
    if current.trace_id == span_context.trace_id:
        span_context = current
    environ[ENV_TRACEPARENT] = str(
        TraceParent(f"{span_context.trace_id:032x}", f"{span_context.span_id:016x}", span_context.trace_flags.sampled)
    )
    if span_context.trace_state:
        environ[ENV_TRACESTATE] = span_context.trace_state.to_header()
    foreign = strip_identity(environ.get(ENV_BAGGAGE, ""))
    ours = scope.identity.to_baggage() + (f",{keys.ROLLOUT_BOUNDARY}=process" if scope.provisional else "")
    environ[ENV_BAGGAGE] = f"{foreign},{ours}" if foreign else ours


def watch_children() -> None:
    """Wraps what starts processes or gives them tasks, now or once it is imported."""
    wraps = {
        "subprocess": _wrap_programs,
        "multiprocessing.process": _wrap_children,
        "multiprocessing.pool": _wrap_pool,
        "concurrent.futures.process": _wrap_executor,
    }
    for module, wrap in wraps.items():
        wrapt.register_post_import_hook(guarded(wrap), module)


def _wrap_programs(module: ModuleType) -> None:
    def init(wrapped: Callable[..., Any], _popen: Any, args: Args, kwargs: Kwargs) -> Any:
        environ = _environment(kwargs.get("env")) if len(args) <= _ENV else None
        if environ is not None:
            kwargs = {**kwargs, "env": environ}
        with hidden:
            return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module.Popen, "__init__", init)


@guarded
def _environment(given: Mapping[Any, Any] | None) -> dict[Any, Any] | None:
    """Returns the environment of a program, if it needs another one than it was given or inherits.

    One with a trace that is not this process's is the program's own choice.
    """
    scope = current_scope()
    if scope is None or scope is process_scope():
        return None
    environ = dict(os.environ if given is None else given)
    if environ.get(ENV_TRACEPARENT) != os.environ.get(ENV_TRACEPARENT):
        return None
    export(scope, environ)
    return environ


def _wrap_children(module: ModuleType) -> None:
    def start(wrapped: Callable[..., Any], process: Any, args: Args, kwargs: Kwargs) -> Any:
        _mark(process)
        try:
            with hidden:
                return wrapped(*args, **kwargs)
        finally:
            vars(process).pop(_ROLLOUT, None)

    def bootstrap(wrapped: Callable[..., Any], process: Any, args: Args, kwargs: Kwargs) -> Any:
        leave = _enter(vars(process).pop(_ROLLOUT, None))
        try:
            return wrapped(*args, **kwargs)
        finally:
            if leave is not None:
                leave()

    wrapt.wrap_function_wrapper(module.BaseProcess, "start", start)
    wrapt.wrap_function_wrapper(module.BaseProcess, "_bootstrap", bootstrap)


def _wrap_pool(module: ModuleType) -> None:
    def submit(wrapped: Callable[..., Any], pool: Any, args: Args, kwargs: Kwargs) -> Any:
        if not isinstance(pool, module.ThreadPool):
            args, kwargs = with_function(_task, args, kwargs)
        with hidden:
            return wrapped(*args, **kwargs)

    for name in METHODS_OF_POOLS:
        wrapt.wrap_function_wrapper(module.Pool, name, submit)


def _wrap_executor(module: ModuleType) -> None:
    def submit(wrapped: Callable[..., Any], _pool: Any, args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = with_function(_task, args, kwargs)
        with hidden:
            return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module.ProcessPoolExecutor, "submit", submit)


class _Task:
    """A function that runs in the rollout in which it was given to a pool, in whichever process."""

    def __init__(self, function: Callable[..., Any], rollout: Mapping[str, str]) -> None:
        self._function = function
        self._rollout = rollout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leave = _enter(self._rollout)
        try:
            with hidden:
                return self._function(*args, **kwargs)
        finally:
            if leave is not None:
                leave()


@guarded
def _task(function: Callable[..., Any]) -> _Task | None:
    rollout = _here()
    return None if rollout is None else _Task(function, rollout)


@guarded
def _mark(process: Any) -> None:
    rollout = _here()
    if rollout is not None:
        vars(process)[_ROLLOUT] = rollout


def _here() -> dict[str, str] | None:
    """Returns the variables that name the running code's rollout: none if it has none; None if this process has had no other."""
    scope = current_scope()
    if scope is not None and scope is process_scope() and not scope.holds_rollouts:
        return None
    rollout: dict[str, str] = {}
    if scope is not None:
        export(scope, rollout)
    return rollout


@guarded
def _enter(rollout: Mapping[str, str] | None) -> Callable[[], object] | None:
    """Makes a rollout the running code's, unless it is; returns what ends that."""
    if rollout is None:
        return None
    base, identity, provisional = from_environment(rollout)
    here, own = current_scope(), process_scope()
    if identity == (here.identity if here is not None else None):
        return None
    scope = None
    if identity is not None:
        scope = Scope(identity, "runner", start_span(PROCESS_SPAN_NAME, base, identity), provisional=provisional)
    else:
        set_process_scope(None)
    token = context.attach(base if scope is None else scope.enter(base))

    @guarded
    def leave() -> None:
        context.detach(token)
        set_process_scope(own)
        if scope is not None:
            scope.span.set_attribute(keys.ROLLOUT_CALLS, scope.calls)
            scope.span.end()

    return leave

"""The boundary between rollouts: `TRAINSPAN_BOUNDARY`, and the servers whose requests are rollouts.

Instrumentation creates a SERVER span for a request only if no span is current. A server's connections therefore start
in a context without the process's span, marked as serving: a model call made there outside any request's span cannot be
assigned to a rollout, and is marked accordingly.
"""

import contextvars
import os
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, Final, Literal, cast

import wrapt
from opentelemetry import context
from opentelemetry.context import Context

from trainspan._guard import Args, Kwargs, guarded, hidden, logger
from trainspan._rollout.scope import process_scope, scope_in

__all__ = [
    "is_outside_of_requests",
    "processes_are_rollouts",
    "requests_are_rollouts",
    "tests_are_rollouts",
    "trusts_baggage",
    "watch_servers",
]

_VARIABLE: Final = "TRAINSPAN_BOUNDARY"
_KINDS: Final = ("process", "request", "test", "explicit")
_SERVING: Final = context.create_key("trainspan-serving")


def _fixed() -> Literal["", "process", "request", "test", "explicit"]:
    kind = os.environ.get(_VARIABLE, "").strip().lower()
    if kind and kind not in _KINDS:
        logger.warning("event=unknown_boundary %s=%r is ignored; use one of %s", _VARIABLE, kind, ", ".join(_KINDS))
        os.environ[_VARIABLE] = kind = ""
    return cast('Literal["", "process", "request", "test", "explicit"]', kind)


def processes_are_rollouts() -> bool:
    """Whether a process without a rollout from elsewhere is a rollout itself."""
    return _fixed() in ("", "process")


def requests_are_rollouts() -> bool:
    """Whether each request of a service, and each job of a worker, is a rollout."""
    return _fixed() in ("", "request")


def tests_are_rollouts() -> bool:
    """Whether each pytest test is a rollout."""
    return _fixed() == "test"


def trusts_baggage() -> bool:
    """Whether callers of a service may set the rollout of their request."""
    return os.environ.get("TRAINSPAN_TRUST_BAGGAGE", "").lower() in ("1", "true", "yes", "on")


def is_outside_of_requests() -> bool:
    """Whether this code serves requests, but is outside any request's span."""
    return bool(context.get_value(_SERVING)) and scope_in(None) is None


def watch_servers() -> None:
    """Makes the requests of known servers start in their own context."""
    wraps = {
        "uvicorn.server": _wrap_uvicorn,
        "uvicorn.supervisors.multiprocess": _wrap_master("Multiprocess"),
        "uvicorn.supervisors.basereload": _wrap_master("BaseReload"),
        "gunicorn.arbiter": _wrap_master("Arbiter"),
        "gunicorn.workers.base": _wrap_gunicorn,
        "aiohttp.web_protocol": _wrap_aiohttp,
        "socketserver": _wrap_socketserver,
    }
    for module, wrap in wraps.items():
        wrapt.register_post_import_hook(guarded(wrap), module)


@guarded
def _begin_serving() -> contextvars.Token[Context] | None:
    """Detaches from the process's span; keeps a runner's rollout or an explicit block around the server."""
    scope = scope_in(None) or process_scope()
    if not requests_are_rollouts() or (scope is not None and not scope.provisional):
        return None
    return context.attach(context.set_value(_SERVING, True, Context()))


def _wrap_uvicorn(module: ModuleType) -> None:
    async def serve(wrapped: Callable[..., Awaitable[Any]], _server: Any, args: Args, kwargs: Kwargs) -> Any:
        with hidden:
            return await _serve_until_done(wrapped, args, kwargs)

    wrapt.wrap_function_wrapper(module.Server, "serve", serve)


async def _serve_until_done(wrapped: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: Any) -> Any:
    token = _begin_serving()
    try:
        return await wrapped(*args, **kwargs)
    finally:
        if token is not None:
            context.detach(token)


def _wrap_gunicorn(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module.Worker, "init_process", _serve)


def _wrap_master(name: str) -> Callable[[ModuleType], None]:
    """Marks the parent process of a server's workers: their requests are the rollouts."""

    def run(wrapped: Callable[..., Any], _master: Any, args: Args, kwargs: Kwargs) -> Any:
        if scope := process_scope():
            scope.holds_rollouts = True
        with hidden:
            return wrapped(*args, **kwargs)

    def wrap_master(module: ModuleType) -> None:
        wrapt.wrap_function_wrapper(getattr(module, name), "run", run)

    return wrap_master


def _wrap_socketserver(module: ModuleType) -> None:
    """Wraps the standard library's server, which also covers Flask, Django and wsgiref."""
    wrapt.wrap_function_wrapper(module.BaseServer, "serve_forever", _serve)


def _wrap_aiohttp(module: ModuleType) -> None:
    """Wraps each connection separately, since the server runs in the program's own tasks."""

    def connect(wrapped: Callable[..., Any], _handler: Any, args: Args, kwargs: Kwargs) -> Any:
        return contextvars.copy_context().run(_serve, wrapped, _handler, args, kwargs)

    wrapt.wrap_function_wrapper(module.RequestHandler, "connection_made", connect)


def _serve(wrapped: Callable[..., Any], _server: Any, args: Args, kwargs: Kwargs) -> Any:
    token = _begin_serving()
    try:
        with hidden:
            return wrapped(*args, **kwargs)
    finally:
        if token is not None:
            context.detach(token)

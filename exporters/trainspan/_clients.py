"""Wraps the HTTP clients that agents use, when they are imported: httpx2 and httpx, requests, aiohttp.

openai 3 sends through httpx2, openai 1 and 2 through httpx.
"""

import functools
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import wrapt

from trainspan import _capture
from trainspan._guard import guarded
from trainspan._http import PolicyRequest, answered, failed, is_policy, prepare, strip

__all__ = ["wrap_clients"]


@functools.cache
def wrap_clients() -> None:
    """Wraps those that are imported, and the others when they will be; once in a process."""
    wraps = {"httpx": _wrap_httpx, "httpx2": _wrap_httpx, "requests": _wrap_requests, "aiohttp": _wrap_aiohttp}
    for module, wrap in wraps.items():
        wrapt.register_post_import_hook(guarded(wrap), module)


@guarded
def _prepare(message: Any) -> PolicyRequest | None:
    return prepare(message.method, str(message.url), message.headers, lambda: _content(message))


def _content(message: Any) -> bytes | None:
    """What is in memory of a request of httpx or requests; a body that is streamed out stays unread."""
    content = getattr(message, "_content", None) or getattr(message, "body", None)
    return content.encode() if isinstance(content, str) else content if isinstance(content, bytes) else None


def _wrap_httpx(module: ModuleType) -> None:
    def send(wrapped: Callable[..., Any], _client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        message, rest, options = _split(args, kwargs)
        request = _prepare(message)
        exchange = _capture.begin(module, message, request)
        outgoing = (exchange and exchange.outgoing()) or message
        try:
            response = wrapped(outgoing, *rest, **options)
            if exchange and exchange.refused(outgoing, response.status_code):
                response.close()
                response = wrapped(message, *rest, **options)
        except Exception:
            failed(request)
            raise
        answered(request, response.status_code)
        if exchange:
            exchange.answer(response)
        return response

    async def send_async(
        wrapped: Callable[..., Awaitable[Any]], _client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        message, rest, options = _split(args, kwargs)
        request = _prepare(message)
        exchange = _capture.begin(module, message, request)
        outgoing = (exchange and exchange.outgoing()) or message
        try:
            response = await wrapped(outgoing, *rest, **options)
            if exchange and exchange.refused(outgoing, response.status_code):
                await response.aclose()
                response = await wrapped(message, *rest, **options)
        except Exception:
            failed(request)
            raise
        answered(request, response.status_code)
        if exchange:
            exchange.answer(response)
        return response

    wrapt.wrap_function_wrapper(module.Client, "send", send)
    wrapt.wrap_function_wrapper(module.AsyncClient, "send", send_async)
    for client in (module.Client, module.AsyncClient):
        if hasattr(client, "_redirect_headers"):
            wrapt.wrap_function_wrapper(client, "_redirect_headers", _redirect_headers)


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The request, and the other arguments of `send`."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["request"], (), {name: value for name, value in kwargs.items() if name != "request"}


def _redirect_headers(wrapped: Callable[..., Any], _client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A redirect copies the headers; identity must not follow it to another host."""
    headers = wrapped(*args, **kwargs)
    url = args[1] if len(args) > 1 else kwargs.get("url")
    if not is_policy(str(url)):
        strip(headers)
    return headers


def _wrap_requests(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module.Session, "send", _send_requests)


def _send_requests(wrapped: Callable[..., Any], _session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Redirects come through here again, each as a request of its own."""
    request = _prepare(args[0] if args else kwargs["request"])
    try:
        response = wrapped(*args, **kwargs)
    except Exception:
        failed(request)
        raise
    answered(request, response.status_code)
    return response


def _wrap_aiohttp(module: ModuleType) -> None:
    """By a trace configuration on every new session: its callbacks see, and may change, the headers of each hop."""
    config = module.TraceConfig()

    async def on_start(_session: Any, context: Any, params: Any) -> None:
        context.trainspan = prepare(params.method, str(params.url), params.headers)

    async def on_redirect(_session: Any, _context: Any, params: Any) -> None:
        location = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
        if not is_policy(str(params.response.url.join(type(params.response.url)(location)))):
            strip(params.headers)

    async def on_end(_session: Any, context: Any, params: Any) -> None:
        answered(context.trainspan, params.response.status)

    async def on_exception(_session: Any, context: Any, params: Any) -> None:
        if isinstance(params.exception, Exception):
            failed(getattr(context, "trainspan", None))

    config.on_request_start.append(on_start)
    config.on_request_redirect.append(on_redirect)
    config.on_request_end.append(on_end)
    config.on_request_exception.append(on_exception)

    def init(wrapped: Callable[..., Any], _session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or ()), config]
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module.ClientSession, "__init__", init)

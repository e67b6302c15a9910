"""Wraps the HTTP clients that agents use once they are imported: httpx2, httpx, requests, urllib3, urllib, aiohttp.

openai 3 sends through httpx2, openai 1 and 2 through httpx. A client may be the transport of another one, as urllib3 is
for requests: the outermost one completes and counts the request.
"""

import functools
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import wrapt

from trainspan._calls import client_capture
from trainspan._calls.policy_request import PolicyRequest, answered, failed, is_policy, prepare, sending, strip
from trainspan._guard import Args, Kwargs, guarded, hidden

__all__ = ["wrap_clients"]


@functools.cache
def wrap_clients() -> None:
    """Wraps each client now or once it is imported; runs once per process."""
    wraps = {
        "httpx": _wrap_httpx,
        "httpx2": _wrap_httpx,
        "requests": _wrap_requests,
        "urllib3.connectionpool": _wrap_urllib3,
        "urllib.request": _wrap_urllib,
        "aiohttp": _wrap_aiohttp,
    }
    for module, wrap in wraps.items():
        wrapt.register_post_import_hook(guarded(wrap), module)


@guarded
def _prepare(message: Any) -> PolicyRequest | None:
    return prepare(message.method, str(message.url), message.headers, lambda: _content(message))


def _content(message: Any) -> bytes | None:
    """Returns the body of a request of httpx or requests if it is in memory; a streamed body is not read."""
    return _bytes(getattr(message, "_content", None) or getattr(message, "body", None))


def _wrap_httpx(module: ModuleType) -> None:
    def send(wrapped: Callable[..., Any], _client: Any, args: Args, kwargs: Kwargs) -> Any:
        message, rest, options = _split(args, kwargs)
        request = _prepare(message)
        exchange = client_capture.begin(module, message, request)
        outgoing = (exchange and exchange.outgoing()) or message
        try:
            with hidden, sending(request):
                response = wrapped(outgoing, *rest, **options)
                if exchange and exchange.refused(outgoing, response.status_code):
                    response.close()
                    response = wrapped(message, *rest, **options)
                    exchange.resent(response.status_code)
        except Exception:
            failed(request)
            raise
        answered(request, response.status_code, response.headers)
        if exchange:
            exchange.answer(response)
        return response

    async def send_async(wrapped: Callable[..., Awaitable[Any]], _client: Any, args: Args, kwargs: Kwargs) -> Any:
        message, rest, options = _split(args, kwargs)
        request = _prepare(message)
        exchange = client_capture.begin(module, message, request)
        outgoing = (exchange and exchange.outgoing()) or message
        try:
            with hidden, sending(request):
                response = await wrapped(outgoing, *rest, **options)
                if exchange and exchange.refused(outgoing, response.status_code):
                    await response.aclose()
                    response = await wrapped(message, *rest, **options)
                    exchange.resent(response.status_code)
        except Exception:
            failed(request)
            raise
        answered(request, response.status_code, response.headers)
        if exchange:
            exchange.answer(response)
        return response

    wrapt.wrap_function_wrapper(module.Client, "send", send)
    wrapt.wrap_function_wrapper(module.AsyncClient, "send", send_async)
    for client in (module.Client, module.AsyncClient):
        if hasattr(client, "_redirect_headers"):
            wrapt.wrap_function_wrapper(client, "_redirect_headers", _redirect_headers)


def _split(args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
    """Returns the request and the other arguments of `send`."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["request"], (), {name: value for name, value in kwargs.items() if name != "request"}


def _redirect_headers(wrapped: Callable[..., Any], _client: Any, args: Args, kwargs: Kwargs) -> Any:
    """Strips identity from a redirect to another host: redirects copy the headers."""
    headers = wrapped(*args, **kwargs)
    url = args[1] if len(args) > 1 else kwargs.get("url")
    if not is_policy(str(url)):
        strip(headers)
    return headers


def _wrap_requests(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module.Session, "send", _send_requests)


def _send_requests(wrapped: Callable[..., Any], _session: Any, args: Args, kwargs: Kwargs) -> Any:
    """Sends a request; redirects call this again from inside."""
    request = _prepare(args[0] if args else kwargs["request"])
    with hidden:
        return _count(request, lambda: wrapped(*args, **kwargs), "status_code")


def _count(request: PolicyRequest | None, send: Callable[[], Any], status: str) -> Any:
    """Returns the response of `send` and counts it; `status` names its status attribute."""
    try:
        with sending(request):
            response = send()
    except Exception:
        failed(request)
        raise
    answered(request, getattr(response, status), response.headers)
    return response


def _wrap_urllib3(module: ModuleType) -> None:
    def urlopen(wrapped: Callable[..., Any], pool: Any, args: Args, kwargs: Kwargs) -> Any:
        """Sends a request; retries and redirects call this again from inside."""
        arguments = dict(zip(("method", "url", "body", "headers"), args, strict=False)) | kwargs
        request = _prepare_urllib3(module, pool, arguments)
        with hidden:
            return _count(request, lambda: wrapped(*args[4:], **arguments), "status")

    wrapt.wrap_function_wrapper(module.HTTPConnectionPool, "urlopen", urlopen)


@guarded
def _prepare_urllib3(module: ModuleType, pool: Any, arguments: Kwargs) -> PolicyRequest | None:
    """Completes the headers among the arguments of `urlopen`."""
    headers = module.HTTPHeaderDict(pool.headers if arguments.get("headers") is None else arguments["headers"])
    before = dict(headers)
    host = f"[{pool.host}]" if ":" in pool.host else pool.host
    url = str(arguments["url"])
    if "://" not in url:
        url = f"{pool.scheme}://{host}:{pool.port or ''}{url}"
    request = prepare(str(arguments["method"]), url, headers, lambda: _bytes(arguments.get("body")))
    if dict(headers) != before:
        arguments["headers"] = headers
    return request


class _UrllibHeaders(MutableMapping[str, str]):
    """The headers of a `urllib.request.Request`; headers set here are not copied to a redirect."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getitem__(self, name: str) -> str:
        value = self._request.get_header(name.capitalize())
        if value is None:
            raise KeyError(name)
        return str(value)

    def __setitem__(self, name: str, value: str) -> None:
        del self[name]
        self._request.add_unredirected_header(name, value)

    def __delitem__(self, name: str) -> None:
        self._request.remove_header(name.capitalize())

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._request.header_items())

    def __len__(self) -> int:
        return len(self._request.header_items())


def _wrap_urllib(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module.AbstractHTTPHandler, "do_open", _send_urllib)


def _send_urllib(wrapped: Callable[..., Any], _handler: Any, args: Args, kwargs: Kwargs) -> Any:
    """Sends a request; called for each hop of a redirect."""
    message = args[1] if len(args) > 1 else kwargs["req"]
    request = prepare(message.get_method(), message.full_url, _UrllibHeaders(message), lambda: _bytes(message.data))
    with hidden:
        return _count(request, lambda: wrapped(*args, **kwargs), "status")


def _bytes(body: Any) -> bytes | None:
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else None


_aiohttp_body: ContextVar[Any] = ContextVar("trainspan-aiohttp-body", default=None)
"""The body that the running code posts through aiohttp: bytes, text, or an object to serialize as JSON."""


def _wrap_aiohttp(module: ModuleType) -> None:
    """Adds a trace configuration to every new session: its callbacks see and may change the headers of each hop."""
    config = module.TraceConfig()

    async def on_start(_session: Any, context: Any, params: Any) -> None:
        context.trainspan = prepare(params.method, str(params.url), params.headers, _posted)

    async def on_redirect(_session: Any, _context: Any, params: Any) -> None:
        location = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
        if not is_policy(str(params.response.url.join(type(params.response.url)(location)))):
            strip(params.headers)

    async def on_end(_session: Any, context: Any, params: Any) -> None:
        answered(context.trainspan, params.response.status, params.response.headers)

    async def on_exception(_session: Any, context: Any, params: Any) -> None:
        if isinstance(params.exception, Exception):
            failed(getattr(context, "trainspan", None))

    config.on_request_start.append(on_start)
    config.on_request_redirect.append(on_redirect)
    config.on_request_end.append(on_end)
    config.on_request_exception.append(on_exception)

    def init(wrapped: Callable[..., Any], _session: Any, args: Args, kwargs: Kwargs) -> Any:
        kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or ()), config]
        with hidden:
            return wrapped(*args, **kwargs)

    async def request(wrapped: Callable[..., Awaitable[Any]], _session: Any, args: Args, kwargs: Kwargs) -> Any:
        token = _aiohttp_body.set(kwargs.get("data") if kwargs.get("json") is None else kwargs["json"])
        try:
            with hidden:
                return await wrapped(*args, **kwargs)
        finally:
            _aiohttp_body.reset(token)

    wrapt.wrap_function_wrapper(module.ClientSession, "__init__", init)
    wrapt.wrap_function_wrapper(module.ClientSession, "_request", request)


def _posted() -> bytes | None:
    body = _aiohttp_body.get()
    return json.dumps(body).encode() if isinstance(body, (dict, list)) else _bytes(body)

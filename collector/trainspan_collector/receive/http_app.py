"""OTLP/HTTP, health, readiness and metrics: one ASGI application.

Spec: https://opentelemetry.io/docs/specs/otlp/#otlphttp. Bodies are read as they come, chunked or not; work that waits for
the disk runs in threads. Every error has a `google.rpc.Status` body in the form that the request had.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from trainspan_collector.network.access import Access, DeniedError, Right
from trainspan_collector.otlp.json_encoding import from_json, parsed_bytes, to_json
from trainspan_collector.otlp.signals import SIGNALS, OtlpSignal
from trainspan_collector.receive.admission import OverloadError
from trainspan_collector.receive.browser_origins import ForeignError, check_origin
from trainspan_collector.receive.export_handler import ExportHandler
from trainspan_collector.receive.gunzip import TooLargeError, gunzip, too_many_bytes
from trainspan_collector.receive.memory_budget import Share
from trainspan_collector.runtime.metrics import CONTENT_TYPE, Metrics, Refusal
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.roles import Role

__all__ = ["HttpApp"]

_JSON: Final = "application/json"
_PROTOBUF: Final = "application/x-protobuf"
_TEXT: Final = "text/plain; charset=utf-8"
_TRANSPORT: Final = "http"
_BODY_S: Final = 60.0
_ROOM_CHECK_S: Final = 0.02
_WORKERS: Final = 64
_PAGE_WORKERS: Final = 4  # apart from those that wait for the disk
_GRPC_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 8, 415: 3, 503: 14}
"""HTTP status → code of google.rpc.Status."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _RefusedError(Exception):
    """An answer other than 200."""

    status: int
    message: str
    reason: Refusal
    headers: tuple[tuple[str, str], ...] = field(default=())


class HttpApp:
    """The application; to be served by an ASGI server. `close` ends its threads."""

    def __init__(
        self,
        exports: ExportHandler,
        *,
        access: Access,
        metrics: Metrics,
        max_request_bytes: int,
        hosts: frozenset[str] | None,
    ) -> None:
        """`hosts` are the names in a Host header that are answered, beside addresses; None: any, since nobody is let in without a token."""
        self._exports = exports
        self._access = access
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes
        self._hosts = hosts
        self._signals = {f"/v1/{signal.name}": signal for signal in SIGNALS}
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="http")
        self._page_threads = ThreadPoolExecutor(_PAGE_WORKERS, thread_name_prefix="pages")

    def close(self) -> None:
        self._threads.shutdown()
        self._page_threads.shutdown()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI's `http` scope defines it."""
        headers = _headers(scope["headers"])
        try:
            check_origin(headers, self._hosts)
            answer = await self._answer(scope["path"], scope["method"], headers, receive)
        except _RefusedError as refused:
            self._count(refused)
            answer = _status_answer(refused, headers.get("content-type", ""))
        except ForeignError as error:
            self._metrics.refused(_TRANSPORT, Refusal.FORBIDDEN)
            foreign = _RefusedError(403, str(error), Refusal.FORBIDDEN)
            answer = _status_answer(foreign, headers.get("content-type", ""))
        except _GoneError:
            return
        named = [("content-type", answer.content_type), ("content-length", str(len(answer.body))), *answer.headers]
        encoded = [(name.encode(), value.encode()) for name, value in named]
        await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, path: str, method: str, headers: dict[str, str], receive: Receive) -> _Answer:
        if signal := self._signals.get(path):
            _check_method(method, ("POST",))
            role = self._authorized(Right.WRITE, headers)
            return await self._export(signal, role, headers, receive)
        if path == "/metrics":
            _check_method(method, ("GET", "HEAD"))
            self._authorized(Right.READ, headers)
            return _Answer(200, CONTENT_TYPE, await self._in_page_thread(self._metrics.text))
        if path in ("/healthz", "/readyz"):
            _check_method(method, ("GET", "HEAD"))
            ready = path == "/healthz" or await self._in_page_thread(lambda: self._exports.is_ready)
            return _Answer(200, _TEXT, b"ok\n") if ready else _Answer(503, _TEXT, b"requests are not taken now\n")
        known = ", ".join((*self._signals, "/healthz", "/readyz", "/metrics"))
        raise _RefusedError(404, f"no such path: {path[:100]!r}; there are {known}", Refusal.NOT_FOUND)

    async def _export(self, signal: OtlpSignal, role: Role, headers: dict[str, str], receive: Receive) -> _Answer:
        media_type = _media_type(headers)
        if media_type not in (_JSON, _PROTOBUF):
            message = f"content type {media_type[:100]!r} is none of {_PROTOBUF}, {_JSON}"
            raise _RefusedError(415, message, Refusal.MEDIA_TYPE)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", ""):
            raise _RefusedError(
                415, f"content encoding {encoding[:100]!r} is none of gzip, identity", Refusal.MEDIA_TYPE
            )
        with self._exports.budget.share(role) as share:
            body = await self._read(headers, receive, share)
            take = functools.partial(self._take, signal, body, encoding == "gzip", media_type == _JSON, role, share)
            del body
            return _Answer(200, headers["content-type"], await self._in_thread(take))

    def _take(
        self, signal: OtlpSignal, body: bytes, compressed: bool, is_json: bool, role: Role, share: Share
    ) -> bytes:
        """The response's body. In a thread of its own: this waits for the disk."""
        try:
            if compressed:
                body = gunzip(body, self._max_request_bytes, share.grow)
            packed = self._from_json(signal, body, share) if is_json else body
        except TooLargeError as error:
            raise _RefusedError(413, str(error), Refusal.TOO_LARGE) from error
        except OverloadError as error:
            raise _overloaded(error) from error
        except ValueError as error:  # InvalidRecordError is one
            raise _RefusedError(400, str(error), Refusal.INVALID) from error
        try:
            outcome = self._exports.take(signal, packed, role, _TRANSPORT, share)
        except InvalidRecordError as error:
            raise _CountedError(400, str(error), Refusal.INVALID) from error
        except TooLargeError as error:
            raise _CountedError(413, str(error), Refusal.TOO_LARGE) from error
        except OverloadError as error:
            retry_after = (("retry-after", str(ceil(error.retry_after_s))),)
            raise _CountedError(503, str(error), error.reason, retry_after) from error
        response = signal.answer(outcome)
        return to_json(response) if is_json else response.SerializeToString()

    def _from_json(self, signal: OtlpSignal, body: bytes, share: Share) -> bytes:
        n_bytes = parsed_bytes(body)
        if n_bytes > self._exports.budget.max_bytes:
            raise TooLargeError(f"the JSON has too many values, which take {n_bytes} bytes: send smaller batches")
        share.grow(n_bytes)
        with self._exports.parsing(len(body)):
            return from_json(signal, body)

    async def _read(self, headers: dict[str, str], receive: Receive, share: Share) -> bytes:
        """The body as it was sent; refused as soon as it is known to be too large, finds no room, or takes too long."""
        limit = self._max_request_bytes
        stated = headers.get("content-length", "0")
        if stated.isdigit() and int(stated) > limit:
            raise _RefusedError(413, str(too_many_bytes(limit, "as sent")), Refusal.TOO_LARGE)
        parts: list[bytes] = []
        n_bytes = 0
        try:
            async with asyncio.timeout(_BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    part = message.get("body", b"")
                    n_bytes += len(part)
                    if n_bytes > limit:
                        raise _RefusedError(413, str(too_many_bytes(limit, "as sent")), Refusal.TOO_LARGE)
                    await _grow(share, len(part))
                    parts.append(part)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError as error:
            raise _RefusedError(408, f"the body was not there after {_BODY_S:.0f} s", Refusal.TOO_SLOW) from error

    def _authorized(self, right: Right, headers: dict[str, str]) -> Role:
        try:
            return self._access.authorize(right, headers.get("authorization"))
        except DeniedError as error:
            if error.is_known:
                raise _RefusedError(403, str(error), Refusal.FORBIDDEN) from error
            challenge = (("www-authenticate", "Bearer"),)
            raise _RefusedError(401, str(error), Refusal.UNAUTHENTICATED, challenge) from error

    async def _in_page_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._page_threads, function)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _count(self, refused: "_RefusedError") -> None:
        if not isinstance(refused, _CountedError):
            self._metrics.refused(_TRANSPORT, refused.reason)


async def _grow(share: Share, n_bytes: int) -> None:
    """Waits for room without a thread. Raises _RefusedError where there is none in time."""
    deadline = time.monotonic() + share.wait_s
    while not share.try_to_grow(n_bytes):
        if time.monotonic() >= deadline:
            raise _overloaded(share.overload())
        await asyncio.sleep(_ROOM_CHECK_S)


def _overloaded(error: OverloadError) -> _RefusedError:
    return _RefusedError(503, str(error), error.reason, (("retry-after", str(ceil(error.retry_after_s))),))


class _CountedError(_RefusedError):
    """Refused by ExportHandler, which has counted it."""


class _GoneError(Exception):
    """The client hung up before its request was whole."""


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


def _media_type(headers: dict[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method not in allowed:
        message = f"{method[:20]} is not for this path, {' and '.join(allowed)} is"
        raise _RefusedError(405, message, Refusal.METHOD, (("allow", ", ".join(allowed)),))


def _status_answer(refused: _RefusedError, content_type: str) -> _Answer:
    """A Status in protobuf where the request was, else in JSON."""
    status: Message = Status(code=_GRPC_CODES[refused.status], message=refused.message)
    if content_type.partition(";")[0].strip().lower() == _PROTOBUF:
        return _Answer(refused.status, content_type, status.SerializeToString(), refused.headers)
    is_json = content_type.partition(";")[0].strip().lower() == _JSON
    return _Answer(refused.status, content_type if is_json else _JSON, to_json(status), refused.headers)

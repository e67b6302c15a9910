"""OTLP/HTTP, health, readiness and metrics: one ASGI application.

Spec: https://opentelemetry.io/docs/specs/otlp/#otlphttp. Bodies are read as they arrive, chunked or not; work that waits for
the disk runs in threads. Every error has a `google.rpc.Status` body in the request's format.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any, Final

from trainspan_collector.network.access import Access, DeniedError, Right
from trainspan_collector.otlp.gunzip import TooLargeError, gunzip
from trainspan_collector.otlp.json_encoding import from_json, parsed_bytes, to_json
from trainspan_collector.otlp.signals import SIGNALS, OtlpSignal
from trainspan_collector.receive.admission import OverloadError
from trainspan_collector.receive.browser_origins import ForeignError, check_origin
from trainspan_collector.receive.export_handler import ExportHandler
from trainspan_collector.receive.http_answers import (
    JSON,
    PROTOBUF,
    CountedError,
    HttpAnswer,
    RefusedError,
    media_type,
    overloaded,
    status_answer,
)
from trainspan_collector.receive.http_body import GoneError, Receive, read_body
from trainspan_collector.receive.memory_budget import Share
from trainspan_collector.runtime.metrics import CONTENT_TYPE, Metrics, RefusalReason
from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.store.roles import Role

__all__ = ["HttpApp"]

_TEXT: Final = "text/plain; charset=utf-8"
_TRANSPORT: Final = "http"
_WORKERS: Final = 64
_PAGE_WORKERS: Final = 4  # separate from those that wait for the disk
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class HttpApp:
    """The application, for an ASGI server. `close` ends its threads."""

    def __init__(
        self,
        exports: ExportHandler,
        *,
        access: Access,
        metrics: Metrics,
        max_request_bytes: int,
        hosts: frozenset[str] | None,
    ) -> None:
        """`hosts` are the names allowed in a Host header, besides addresses; None: any, since nobody gets in without a token."""
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
        """Handles one request, as defined by ASGI's `http` scope."""
        headers = _headers(scope["headers"])
        try:
            check_origin(headers, self._hosts)
            answer = await self._answer(scope["path"], scope["method"], headers, receive)
        except RefusedError as refused:
            self._count(refused)
            answer = status_answer(refused, headers.get("content-type", ""))
        except ForeignError as error:
            self._metrics.refused(_TRANSPORT, RefusalReason.FORBIDDEN)
            foreign = RefusedError(403, str(error), RefusalReason.FORBIDDEN)
            answer = status_answer(foreign, headers.get("content-type", ""))
        except GoneError:
            return
        fields = [("content-type", answer.content_type), ("content-length", str(len(answer.body))), *answer.headers]
        encoded = [(name.encode(), value.encode()) for name, value in fields]
        await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, path: str, method: str, headers: dict[str, str], receive: Receive) -> HttpAnswer:
        if signal := self._signals.get(path):
            _check_method(method, ("POST",))
            role = self._authorized(Right.WRITE, headers)
            return await self._export(signal, role, headers, receive)
        if path == "/metrics":
            _check_method(method, ("GET", "HEAD"))
            self._authorized(Right.READ, headers)
            return HttpAnswer(200, CONTENT_TYPE, await self._in_page_thread(self._metrics.text))
        if path in ("/healthz", "/readyz"):
            _check_method(method, ("GET", "HEAD"))
            ready = path == "/healthz" or await self._in_page_thread(lambda: self._exports.is_ready)
            return (
                HttpAnswer(200, _TEXT, b"ok\n") if ready else HttpAnswer(503, _TEXT, b"requests are not accepted now\n")
            )
        known = ", ".join((*self._signals, "/healthz", "/readyz", "/metrics"))
        raise RefusedError(404, f"no such path: {path[:100]!r}; paths are {known}", RefusalReason.NOT_FOUND)

    async def _export(self, signal: OtlpSignal, role: Role, headers: dict[str, str], receive: Receive) -> HttpAnswer:
        sent_as = media_type(headers.get("content-type", ""))
        if sent_as not in (JSON, PROTOBUF):
            message = f"content type {sent_as[:100]!r} is not supported: use {PROTOBUF} or {JSON}"
            raise RefusedError(415, message, RefusalReason.MEDIA_TYPE)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", ""):
            raise RefusedError(
                415,
                f"content encoding {encoding[:100]!r} is not supported: use gzip or identity",
                RefusalReason.MEDIA_TYPE,
            )
        with self._exports.budget.share(role) as share:
            body = await read_body(headers, receive, share, self._max_request_bytes)
            take = functools.partial(self._take, signal, body, encoding == "gzip", sent_as == JSON, role, share)
            del body
            return HttpAnswer(200, headers["content-type"], await self._in_thread(take))

    def _take(
        self, signal: OtlpSignal, body: bytes, compressed: bool, is_json: bool, role: Role, share: Share
    ) -> bytes:
        """The response's body. Runs in a separate thread, since it waits for the disk."""
        try:
            if compressed:
                body = gunzip(body, self._max_request_bytes, share.grow)
            packed = self._from_json(signal, body, role, share) if is_json else body
        except TooLargeError as error:
            raise RefusedError(413, str(error), RefusalReason.TOO_LARGE) from error
        except OverloadError as error:
            raise overloaded(error) from error
        except ValueError as error:  # also InvalidRecordError
            raise RefusedError(400, str(error), RefusalReason.INVALID) from error
        try:
            outcome = self._exports.handle(signal, packed, role, _TRANSPORT, share)
        except InvalidRecordError as error:
            raise CountedError(400, str(error), RefusalReason.INVALID) from error
        except TooLargeError as error:
            raise CountedError(413, str(error), RefusalReason.TOO_LARGE) from error
        except OverloadError as error:
            retry_after = (("retry-after", str(ceil(error.retry_after_s))),)
            raise CountedError(503, str(error), error.reason, retry_after) from error
        response = signal.answer(outcome)
        return to_json(response) if is_json else response.SerializeToString()

    def _from_json(self, signal: OtlpSignal, body: bytes, role: Role, share: Share) -> bytes:
        n_bytes = parsed_bytes(body)
        if n_bytes > self._exports.budget.max_bytes:
            raise TooLargeError(f"the JSON has too many values, which take {n_bytes} bytes: send smaller batches")
        share.grow(n_bytes)
        with self._exports.parsing(role, len(body)):
            return from_json(signal, body)

    def _authorized(self, right: Right, headers: dict[str, str]) -> Role:
        try:
            return self._access.authorize(right, headers.get("authorization"))
        except DeniedError as error:
            self._access.denials.note(_TRANSPORT, error)
            if error.is_known:
                raise RefusedError(403, str(error), RefusalReason.FORBIDDEN) from error
            challenge = (("www-authenticate", "Bearer"),)
            raise RefusedError(401, str(error), RefusalReason.UNAUTHENTICATED, challenge) from error

    async def _in_page_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._page_threads, function)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _count(self, refused: "RefusedError") -> None:
        if not isinstance(refused, CountedError):
            self._metrics.refused(_TRANSPORT, refused.reason)


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method not in allowed:
        message = f"{method[:20]} is not allowed for this path: use {' or '.join(allowed)}"
        raise RefusedError(405, message, RefusalReason.METHOD, (("allow", ", ".join(allowed)),))

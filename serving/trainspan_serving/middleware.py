"""The ASGI class that vLLM loads (`--middleware`): capture, gate and swap around vLLM's own application."""

import asyncio
import atexit
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from trainspan_schemas import keys
from trainspan_schemas.errors import InvalidRecordError

from .admin import POLICY_PATH, handle_policy
from .caller import identify
from .capture import EngineTap, Exchange
from .export import Exporter
from .link import report
from .plan import ServerPlan
from .policy import PolicyServer
from .response import answer_json

__all__ = ["PolicyMiddleware"]

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_FLUSH_S = 5.0


class PolicyMiddleware:
    """Wraps the application; connects to the engine when the server starts."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._plan = ServerPlan.from_environ(os.environ)
        self._exporter: Exporter | None = None
        self._server: PolicyServer | None = None
        self._tap: EngineTap | None = None
        self._api_keys: list[str] = []
        self._ready: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] != "http" or self._server is None or self._tap is None:
            await self._app(scope, receive, send)
        elif scope["path"] == POLICY_PATH:
            await handle_policy(self._server, scope, receive, send)
        else:
            await self._serve(self._server, self._tap, scope, receive, send)

    async def _serve(self, server: PolicyServer, tap: EngineTap, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = identify(scope, self._api_keys)
        except InvalidRecordError as error:
            await answer_json(send, 400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if not await server.gate.enter(self._plan.swap_timeout_s):
            message = f"new weights are being loaded for more than {self._plan.swap_timeout_s:g} s; try again"
            body = {"error": {"message": message, "type": "ServiceUnavailableError", "code": 503}}
            await answer_json(send, 503, body, [(b"retry-after", b"1")])
            return
        exchange = Exchange(caller, scope["path"], server.policy.version)
        exchange.when_settled(server.gate.leave)
        answer = _Answer(receive, send, server.policy.version)
        try:
            with tap.exchange(exchange):
                await self._app(scope, answer.receive, answer.send)
        finally:
            exchange.end_http(delivered=answer.delivered)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_and_start() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._start(scope["app"])
            return message

        async def stop_and_send(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await self._stop()
            await send(message)

        await self._app(scope, receive_and_start, stop_and_send)

    async def _start(self, app: Any) -> None:
        plan, engine = self._plan, app.state.engine_client
        exporter = Exporter(plan.collector, metadata=_metadata(plan.otlp_headers))
        atexit.register(exporter.close, 0.5)
        self._exporter = exporter
        self._tap = EngineTap(engine, plan.served_name, exporter.add, train_sampling=plan.train_sampling)
        self._server = await PolicyServer.start(plan, engine, self._tap, exporter)
        self._api_keys = [key for key in app.state.args.api_key or [os.environ.get("VLLM_API_KEY")] if key]
        self._ready = asyncio.create_task(_report_when_listening(app))

    async def _stop(self) -> None:
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close, _FLUSH_S)
            counts = self._exporter.counts()
            _log.info(
                "capture closed captured=%d exported=%d dropped=%d", counts.captured, counts.exported, counts.dropped
            )


class _Answer:
    """Adds the policy version to the answer, and knows whether the client was sent all of it."""

    def __init__(self, receive: Receive, send: Send, version: int) -> None:
        self._receive, self._send = receive, send
        self._header = (keys.HEADER_POLICY_VERSION.encode(), str(version).encode())
        self._good = self._gone = False
        self.delivered = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._gone |= message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._good = message["status"] == 200
            message = {**message, "headers": [*message.get("headers", ()), self._header]}
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        gone = self._gone
        await self._send(message)
        if last:
            self.delivered = self._good and not gone


def _metadata(headers: str) -> tuple[tuple[str, str], ...]:
    """`k=v,k=v` of OTEL_EXPORTER_OTLP_HEADERS as gRPC metadata."""
    pairs = (item.partition("=") for item in headers.split(",") if "=" in item)
    return tuple((key.strip().lower(), unquote(value.strip())) for key, _, value in pairs)


async def _report_when_listening(app: Any) -> None:
    while not app.state.server.started:
        await asyncio.sleep(0.01)
    report({"event": "ready"})

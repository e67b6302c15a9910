"""The ASGI class that vLLM loads (`--middleware`): capture, gate and swap around vLLM's own application."""

import asyncio
import atexit
import hmac
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainspan_schemas.agents.call_kinds import kind_of_request, stated_in_headers
from trainspan_schemas.agents.unnamed_agents import agent_of_request, is_derived
from trainspan_schemas.errors import InvalidRecordError, one_line
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.store.endpoint import headers_of
from trainspan_schemas.telemetry.failures import FAILURES_PATH, RequestFailures, keys_of_path, unsigned_key
from trainspan_schemas.telemetry.signing import signing_key
from trainspan_serving.capture.call_counter import CallCounter
from trainspan_serving.capture.caller import Caller, identify
from trainspan_serving.capture.engine_tap import Asked, EngineTap, Exchange
from trainspan_serving.capture.tool_use import tool_results_in_request
from trainspan_serving.export.call_export import CallExport
from trainspan_serving.export.collector_client import CollectorClient
from trainspan_serving.export.exporter import Exporter
from trainspan_serving.export.spools import open_spools
from trainspan_serving.export.state_folder import StateFolder, claim_state
from trainspan_serving.forcing.registry import BranchRegistry
from trainspan_serving.http.admin import ADMIN_PREFIX, handle_admin
from trainspan_serving.http.answer import AnswerStream
from trainspan_serving.http.asgi import App, Message, Receive, Scope, Send, answer_error, answer_json
from trainspan_serving.http.body import BodyError, ClientGoneError, check_json, read_body, replayed
from trainspan_serving.http.failures import FailureLog
from trainspan_serving.http.metrics import PolicyMetrics
from trainspan_serving.http.prefixes import PREFIX_PATHS, handle_prefix
from trainspan_serving.http.request import only_echoes, rewritten
from trainspan_serving.process.link import report
from trainspan_serving.process.server_plan import ServerPlan, plan_of_process
from trainspan_serving.swap.catching_up import CatchingUp
from trainspan_serving.swap.engine import Engine
from trainspan_serving.swap.policy_server import PolicyServer

__all__ = ["PolicyMiddleware"]

_log = logging.getLogger(__name__)


_FLUSH_S = 5.0
_MAX_SPOOL_BYTES = 1024 * 1024 * 1024
"""Call spans on disk that wait for one collector; beyond it the newest are dropped."""
_MAX_PREFIX_BYTES = 256 * 1024 * 1024
"""Memory for the stored calls that branches of rollouts repeat."""
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Paths for which vLLM asks for its API key."""
_WITHOUT_WEIGHTS = frozenset(
    [
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        *(f"/v1/{kind}/render" for kind in ("chat/completions", "completions", "messages", "responses")),
        *(f"/v1/{kind}/derender" for kind in ("chat/completions", "completions")),
    ]
)
"""Requests that need only the tokenizer: they and swaps do not wait for each other. Any other POST counts."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The objects created when the server starts."""

    exporter: CallExport
    tap: EngineTap
    server: PolicyServer
    api_keys: tuple[str, ...]
    signing_key: bytes
    branches: BranchRegistry
    failures: FailureLog
    counter: CallCounter

    def requests_of(self, attempt_keys: Sequence[str]) -> RequestFailures:
        calls, unsigned = (
            sum(map(self.counter.count, all_keys)) for all_keys in (attempt_keys, map(unsigned_key, attempt_keys))
        )
        refusals = self.failures.of(attempt_keys)
        return RequestFailures(
            refusals.failures,
            self.failures.up_s,
            calls,
            unsigned,
            self.tap.unnamed_calls,
            refusals.overflows,
            refusals.reason,
        )


class PolicyMiddleware:
    """Wraps the application; connects to the engine when the server starts."""

    def __init__(self, app: App) -> None:
        # A package that vLLM imports sets the root logger to ERROR, so that no line of ours would be written.
        level = os.environ.get("TRAINSPAN_LOG", "WARNING").upper()
        logging.getLogger("trainspan_serving").setLevel(level)
        self._app = app
        self._parts: _Parts | None = None
        self._ready: asyncio.Task[None] | None = None
        self._state: StateFolder | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] != "http" or self._parts is None:
            await self._app(scope, receive, send)
        elif scope["path"] in PREFIX_PATHS:
            timeout_s = self._parts.server.plan.settings.body_timeout_s
            await handle_prefix(self._parts.branches, self._parts.signing_key, timeout_s, scope, receive, send)
        elif scope["path"].startswith(FAILURES_PATH):
            await answer_json(send, 200, self._parts.requests_of(keys_of_path(scope["raw_path"])).to_record())
        elif scope["path"].startswith(ADMIN_PREFIX):
            parts = self._parts
            await handle_admin(parts.server, parts.exporter, parts.branches, scope, receive, send)
        elif scope["path"] == "/health" and not self._parts.server.is_ready:
            await answer_json(send, 503, {"error": self._parts.server.behind})
        else:
            await self._serve(self._parts, scope, receive, send)

    async def _serve(self, parts: _Parts, scope: Scope, receive: Receive, send: Send) -> None:
        server = parts.server
        try:
            caller = identify(scope, parts.api_keys, parts.signing_key)
        except InvalidRecordError as error:
            await answer_error(send, 400, str(error))
            return
        if scope["method"] != "POST":  # a client may ask for what other servers have
            await self._app(scope, receive, send)
            return
        watched = parts.failures.watched(caller, send)
        if _lacks_key(scope, parts.api_keys):
            await answer_json(send, 401, {"error": "Unauthorized"})  # as vLLM does, but before the body is read
            return
        if server.plan.settings.require_signature and not caller.is_signed:
            message = "this server answers only rollouts started by a runner with its signing key"
            await answer_error(send, 401, message)
            return
        limits = server.plan.settings
        try:
            body = await read_body(scope, receive, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)
            request = check_json(scope, body)
        except ClientGoneError:
            return
        except BodyError as error:
            await answer_error(watched, error.status, str(error))
            return
        if scope["path"] == "/v1/responses" and request.get("background") not in (None, False):
            await answer_error(
                watched, 400, "a response in the background could not be recorded: leave `background` out"
            )
        elif scope["path"] in _WITHOUT_WEIGHTS:
            await self._app(scope, replayed(body, receive), watched)
        else:
            agent, kind = stated_in_headers(scope["headers"])
            if is_derived(caller.agent):
                caller = replace(caller, agent=agent or caller.agent or agent_of_request(request))
            body, max_tokens = rewritten(scope, body, request, parts.tap.max_model_len)
            asked = Asked(max_tokens, kind or kind_of_request(request), tool_results_in_request(request))
            await self._generate(parts, caller, asked, request, scope, replayed(body, receive), send)

    async def _generate(
        self,
        parts: _Parts,
        caller: Caller,
        asked: Asked,
        request: JsonObject,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Passes a request that may use the weights to vLLM; holds it while they change. `receive` yields its body again."""
        server, limit_s = parts.server, parts.server.plan.settings.swap_timeout_s
        exchange: Exchange | None = None
        send = parts.failures.watched(caller, send, lambda: exchange is not None and bool(exchange.generations))
        entered = await server.gate.enter(limit_s)
        if entered is None:
            why = "it is asleep" if server.asleep else "new weights are being loaded"
            await answer_error(
                send, 503, f"the policy server has held this request for {limit_s:g} s because {why}; try again"
            )
            return
        model = request.get("model") if server.policies.named else None
        policy = server.policies.choose(
            model if isinstance(model, str) else None, caller.agent, asked.kind.kind if asked.kind else None
        )
        branch = parts.branches.find(caller.attempt, caller.trace_id) if caller.is_signed else None
        exchange = Exchange(caller, scope["path"], policy, branch=branch, asked=asked)
        exchange.when_settled(lambda: server.gate.leave(entered))
        answer = AnswerStream(receive, send, exchange, is_one_of_several=bool(server.policies.named))
        try:
            with parts.tap.exchange(exchange):
                await self._app(scope, answer.receive, answer.send)
        except Exception:
            if not await answer.end_stream():
                if exchange.generations:
                    parts.failures.add(caller)
                raise
        finally:
            if exchange.is_cut and exchange.ended_status == 503:  # also in a stream, whose status was sent
                parts.failures.add(caller)
            exchange.end_http(delivered=answer.delivered and not only_echoes(scope["path"], request))

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_and_start() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._start(scope["app"])
                except Exception as error:
                    # Otherwise uvicorn assumes that the application has no lifespan, and serves it without capture.
                    await send({"type": "lifespan.startup.failed", "message": f"trainspan: {one_line(error)}"})
                    raise
            return message

        async def stop_and_send(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await self._stop()
            await send(message)

        await self._app(scope, receive_and_start, stop_and_send)

    async def _start(self, app: Any) -> None:
        plan, client = plan_of_process(app.state.args, os.environ), app.state.engine_client
        self._state = await asyncio.to_thread(claim_state, Path(plan.state))
        counter = CallCounter(self._state.path / "calls.sqlite")
        exporter = _open_export(plan, self._state.path)
        atexit.register(exporter.close, 0.5)
        tap = EngineTap(
            client,
            plan.settings.served_name,
            exporter.add,
            counter,
            temperatures=plan.temperatures,
            has_priorities=not plan.settings.swap_in_flight,
        )
        server = await PolicyServer.start(plan, Engine(client, merges_adapters=bool(plan.settings.merge_adapters)), tap)
        branches = BranchRegistry(
            client.model_config.get_vocab_size(),
            _MAX_PREFIX_BYTES,
            lambda ids: client.get_tokenizer().decode(list(ids)),
        )
        PolicyMetrics(server, exporter.counts, branches).register()
        keys_given = app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]
        api_keys = tuple(key for key in keys_given if key)
        key = signing_key(plan.settings.signing_key_file)
        self._parts = _Parts(exporter, tap, server, api_keys, key, branches, FailureLog(), counter)
        catching_up = CatchingUp(server)
        await catching_up.before_listening()
        self._ready = asyncio.create_task(_report_when_listening(app, catching_up))

    async def _stop(self) -> None:
        if self._ready is not None:
            self._ready.cancel()
        if self._parts is not None:
            self._parts.server.stop_copying()
            await asyncio.to_thread(self._parts.exporter.close, _FLUSH_S)
            counts = self._parts.exporter.counts()
            _log.info(
                "capture closed captured=%d exported=%d dropped=%d refused=%d spooled=%d",
                counts.captured,
                counts.exported,
                counts.dropped,
                counts.refused,
                counts.spooled,
            )


def _open_export(plan: ServerPlan, state: Path) -> CallExport:
    collectors = plan.collectors
    if collectors is None:
        return CallExport(None, {})

    def client(url: str) -> CollectorClient:
        return CollectorClient(
            url,
            lambda: tuple(headers_of(plan.headers_for(url)).items()),
            plan.otlp_certificate,
            lambda: plan.token_advice(url),
        )

    spools = open_spools(state / "spool", collectors, _MAX_SPOOL_BYTES)
    return CallExport(collectors, {url: Exporter(client(url), spool) for url, spool in spools.items()})


def _lacks_key(scope: Scope, api_keys: Sequence[str]) -> bool:
    """Whether vLLM would answer 401."""
    if not api_keys or not scope["path"].startswith(_GUARDED):
        return False
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    return scheme.lower() != b"bearer" or not any(hmac.compare_digest(key, known.encode()) for known in api_keys)


async def _report_when_listening(app: Any, catching_up: CatchingUp) -> None:
    while not app.state.server.started:
        await asyncio.sleep(0.01)
    report({"event": "ready"})
    await catching_up.after_listening()

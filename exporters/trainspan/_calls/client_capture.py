"""Token capture in the agent, for a policy server that is not ours: `TRAINSPAN_CAPTURE=client`, httpx and httpx2.

Each choice becomes a call span like the policy server's (`serving/`), of kind CLIENT. Fields that the server does not
return are named on the span, which is then not trained on. If a server refuses the extra fields, the request is resent
without them.
"""

import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from trainspan._calls.openai_wire import ChoiceParts, GenerationRequest, ResponseCollector, question_of
from trainspan._calls.policy_request import PolicyRequest
from trainspan._guard import guarded
from trainspan._rollout.scope import Scope
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import is_constrained
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs

__all__ = ["ClientExchange", "begin", "forget", "report_unread"]

_VARIABLE: Final = "TRAINSPAN_CAPTURE"
_REFUSALS: Final = frozenset({400, 404, 422})
_SAMPLING: Final = {
    "temperature": keys.GEN_AI_TEMPERATURE,
    "top_p": keys.GEN_AI_TOP_P,
    "top_k": keys.GEN_AI_TOP_K,
    "min_p": keys.GEN_AI_MIN_P,
    "frequency_penalty": keys.GEN_AI_FREQUENCY_PENALTY,
    "presence_penalty": keys.GEN_AI_PRESENCE_PENALTY,
    "repetition_penalty": keys.GEN_AI_REPETITION_PENALTY,
    "seed": keys.GEN_AI_SEED,
}

_refusing: set[str] = set()
"""Origins that refuse requests for token ids."""


def _capture_is_on() -> bool:
    """Whether the user enabled capture in the agent."""
    return os.environ.get(_VARIABLE, "").strip().lower() == "client"


_unreported: Final[set["ClientExchange"]] = set()


@dataclass(slots=True, eq=False)
class ClientExchange:
    """A client's generation request and its response."""

    module: ModuleType
    original: Any
    """The client's own request."""
    question: GenerationRequest | None
    agent: str | None
    scope: Scope | None
    origin: str
    path: str
    start_ns: int = field(default_factory=time.time_ns)
    context: Context = field(default_factory=context.get_current)
    parts: ResponseCollector | None = None
    """What has arrived of a stream."""
    _reported: bool = False

    @guarded
    def outgoing(self) -> Any:
        """Returns the request to send: the client's, with our extra fields."""
        if self.question is None or self.origin in _refusing:
            return self.original
        headers = [
            (name, value)
            for name, value in self.original.headers.multi_items()
            if name.lower() not in ("content-length", "accept-encoding")
        ]
        return self.module.Request(
            self.original.method,
            self.original.url,
            headers=[*headers, ("accept-encoding", "identity")],
            content=self.question.content,
            extensions=self.original.extensions,
        )

    def refused(self, sent: Any, status: int) -> bool:
        """Whether to resend without our extra fields, which may be what the server refuses."""
        return sent is not self.original and status in _REFUSALS

    def resent(self, status: int) -> None:
        """Omits our extra fields from now on, unless the server refuses the client's own request as well."""
        if status not in _REFUSALS:
            _refusing.add(self.origin)

    @guarded
    def answer(self, response: Any) -> None:
        """Reads the response, now or while the client does."""
        response.request = self.original
        if response.status_code != 200 or keys.HEADER_POLICY_VERSION in response.headers:
            return  # an error is not a call, and our own policy server captures calls itself
        answer = ResponseCollector(self.question or GenerationRequest({}, b"", False, False, is_chat=False))
        if hasattr(response, "_content"):
            if _is_events(response):
                response._content = answer.piece(response.content) + answer.end()
            else:
                response._content = answer.whole(response.content)
            if "content-length" in response.headers:
                response.headers["content-length"] = str(len(response._content))
            self.report(answer)
            return
        self.parts = answer
        _unreported.add(self)
        if isinstance(response.stream, self.module.SyncByteStream):
            response.stream = _reading(self, answer, response, self.module.SyncByteStream)
        else:
            response.stream = _reading_async(self, answer, response, self.module.AsyncByteStream)

    def piece(self, answer: ResponseCollector, data: bytes) -> bytes:
        """Returns what the client gets of a stream's `data`; it may never ask for more after the last choice."""
        passed = answer.piece(data)
        if answer.finished:
            self.report(answer)
        return passed

    @guarded
    def report(self, answer: ResponseCollector) -> None:
        """Sends the call spans once."""
        if self._reported:
            return
        self._reported = True
        _unreported.discard(self)
        index = self.scope.next_call_index() if self.scope else 0
        tracer = trace.get_tracer("trainspan")
        for number, choice in sorted((answer.choices or {0: ChoiceParts()}).items()):
            span = tracer.start_span(
                f"{self._operation} {answer.model or 'policy'}",
                self.context,
                SpanKind.CLIENT,
                self._attributes(answer, number, choice) | {keys.CALL_INDEX: index},
                start_time=self.start_ns,
            )
            span.end()

    @property
    def _operation(self) -> str:
        is_text = self.path.rstrip("/").endswith("/completions") and not self.path.rstrip("/").endswith(
            "/chat/completions"
        )
        return keys.OPERATION_TEXT_COMPLETION if is_text else keys.OPERATION_CHAT

    def _attributes(self, answer: ResponseCollector, number: int, choice: ChoiceParts) -> dict[str, Any]:
        request = self.question.request if self.question else {}
        model = str(answer.model or request.get("model") or "")
        attributes: dict[str, Any] = {
            keys.GEN_AI_OPERATION: self._operation,
            keys.GEN_AI_REQUEST_MODEL: str(request.get("model") or model),
            keys.GEN_AI_RESPONSE_MODEL: model,
            keys.POLICY_NAME: model,
            keys.GEN_AI_FINISH_REASONS: [choice.finish_reason or "abort"],
            keys.CALL_ENDPOINT: self.path,
            keys.CALL_RECORDED_BY: "client",
            keys.CALL_DELIVERED: choice.finish_reason is not None,
            keys.CHOICE_INDEX: number,
            keys.SAMPLING_CONSTRAINED: is_constrained(request),
        }
        if answer.response_id:
            attributes[keys.GEN_AI_RESPONSE_ID] = answer.response_id
        if self.agent:
            attributes[keys.GEN_AI_AGENT_NAME] = self.agent
        for name, key in _SAMPLING.items():
            value = request.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                attributes[key] = int(value) if name in ("seed", "top_k") else float(value)
        lacks = []
        if choice.ids and choice.prompt_ids:
            attributes[keys.PROMPT_TOKEN_IDS] = encode_ids(choice.prompt_ids)
            attributes[keys.COMPLETION_TOKEN_IDS] = encode_ids(choice.ids)
        else:
            lacks.append("token_ids")
        if choice.logprobs and len(choice.logprobs) == len(choice.ids):
            attributes[keys.COMPLETION_LOGPROBS] = encode_logprobs(choice.logprobs)
        else:
            lacks.append("logprobs")
        if lacks:
            attributes[keys.CALL_LACKS] = lacks
        return attributes


def forget() -> None:
    """Leaves the parent's streams to it, in a forked child."""
    _unreported.clear()


def report_unread() -> None:
    """Sends the calls whose streams the program neither read to the end nor closed, before the process ends."""
    for exchange in list(_unreported):
        if exchange.parts is not None:
            exchange.report(exchange.parts)


@guarded
def begin(module: ModuleType, request: Any, sent: PolicyRequest | None) -> ClientExchange | None:
    """Starts an exchange for a generation request to the policy; None for other requests or if capture is off."""
    if sent is None or not sent.is_generation or not _capture_is_on():
        return None
    content = getattr(request, "_content", None)
    path = request.url.path
    question = question_of(path, content) if content else None
    origin = f"{request.url.scheme}://{request.url.netloc.decode()}"
    return ClientExchange(module, request, question, sent.agent, sent.scope, origin, path)


def _is_events(response: Any) -> bool:
    return "text/event-stream" in response.headers.get("content-type", "")


def _reading(exchange: ClientExchange, answer: ResponseCollector, response: Any, base: type) -> Any:
    source, events = response.stream, _is_events(response)

    class Reading(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[bytes]:
            body = b""
            try:
                for data in source:
                    if events:
                        yield exchange.piece(answer, data)
                    else:
                        body += data
                yield answer.end() if events else answer.whole(body)
            finally:
                exchange.report(answer)

        def close(self) -> None:
            source.close()
            exchange.report(answer)

    return Reading()


def _reading_async(exchange: ClientExchange, answer: ResponseCollector, response: Any, base: type) -> Any:
    source, events = response.stream, _is_events(response)

    class Reading(base):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            body = b""
            try:
                async for data in source:
                    if events:
                        yield exchange.piece(answer, data)
                    else:
                        body += data
                yield answer.end() if events else answer.whole(body)
            finally:
                exchange.report(answer)

        async def aclose(self) -> None:
            await source.aclose()
            exchange.report(answer)

    return Reading()

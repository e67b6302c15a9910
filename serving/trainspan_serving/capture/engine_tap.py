"""Token-exact capture: turns every generation of the engine into call spans, whichever endpoint requested it.

`EngineTap` wraps the engine client's `generate`; an `Exchange` (one HTTP request) carries the caller and collects the
engine's outputs. Neither request nor response changes: the engine also returns the chosen tokens' log-probabilities,
which the endpoints leave out of the response if the client did not ask for them.
"""

import contextlib
import contextvars
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from trainspan_schemas.agents.call_kinds import RequestKind
from trainspan_schemas.errors import one_line
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tools import ToolResult, results_to_json
from trainspan_serving.capture.call_counter import CallCounter
from trainspan_serving.capture.caller import Caller
from trainspan_serving.capture.constraints import EngineConstraints
from trainspan_serving.capture.generation import Generation, override_sampling, with_logprobs
from trainspan_serving.capture.offered_tools import OfferedTools
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.export.call_span import AttributeValue, CallSpan
from trainspan_serving.forcing.branch import Branch
from trainspan_serving.forcing.divergence import DivergedError
from trainspan_serving.forcing.replay import Replayer

__all__ = ["Asked", "EngineTap", "Exchange"]

_log = logging.getLogger(__name__)

_CURRENT: contextvars.ContextVar["Exchange | None"] = contextvars.ContextVar("trainspan_exchange", default=None)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the body of a request says."""

    max_tokens: int | None = None
    """Output tokens; they may be more than the context holds."""
    kind: RequestKind | None = None
    tool_results: Sequence[ToolResult] = ()


class Exchange:
    """One HTTP request and the generations it caused; all its calls share one call index.

    `policy` answers the whole request, even if another one goes into service in the meantime.
    The exchange is settled, and its spans are emitted, once the HTTP side and every generation have ended.
    """

    def __init__(
        self,
        caller: Caller,
        endpoint: str,
        policy: ServedPolicy,
        *,
        internal: bool = False,
        branch: Branch | None = None,
        asked: Asked = Asked(),
    ) -> None:
        self.caller, self.endpoint, self.policy, self.internal = caller, endpoint, policy, internal
        self.branch = branch
        """The stored calls that answer it first, if the caller's rollout is a branch of another one."""
        self.asked = asked
        self.start_ns = time.time_ns()
        self.trace_id = caller.parent.trace_id if caller.parent else secrets.token_hex(16)
        self.span_id = secrets.token_hex(8)
        """Of the call of its first choice, which the response names in a header."""
        self.call_index: int | None = None
        self.tools: str | None = None
        """JSON of the tools that the request offers."""
        self.tool_calls: dict[int, dict[str, None]] = {}
        """Choice → ids of the tool calls in its answer, in order."""
        self.choices = 0
        """Choices of all generations so far; the next generation's choices are numbered from here."""
        self.delivered = False
        self.generations: list[Generation] = []
        self.ended_because: str | None = None
        """Why the server stops its generations; the client gets this text."""
        self.ended_status = 503
        """The status that goes with it: 503, or 422 if the rollout's branch has diverged."""
        self.is_cut = False
        """Whether a generation was stopped or rejected for that reason."""
        self._running = 0
        self._open = True
        self._on_settled: list[Callable[[], None]] = []

    def when_settled(self, action: Callable[[], None]) -> None:
        self._on_settled.append(action)

    def begin_generation(self) -> None:
        self._running += 1

    def end_generation(self) -> None:
        self._running -= 1
        self._settle()

    def end_http(self, *, delivered: bool) -> None:
        """Marks the HTTP side as ended. `delivered`: a complete, successful response was sent to the client."""
        self.delivered = delivered
        self._open = False
        self._settle()

    @property
    def is_settled(self) -> bool:
        return not self._open and not self._running

    def _settle(self) -> None:
        if self.is_settled:
            actions, self._on_settled = self._on_settled, []
            for action in actions:
                action()


class EngineTap:
    """Wraps the engine client's `generate` and passes finished calls to `sink`."""

    def __init__(
        self,
        engine: Any,
        served_name: str,
        sink: Callable[[CallSpan], None],
        counter: CallCounter,
        *,
        temperatures: Mapping[str, float],
        has_priorities: bool = True,
    ) -> None:
        """`has_priorities`: whether clients may state a priority, if the engine uses priorities."""
        self._has_priorities = has_priorities
        self._generate: Callable[..., AsyncGenerator[Any, None]] = engine.generate
        self._served_name = served_name
        self._sink = sink
        self._temperatures = temperatures
        self._logprobs_mode = "processed" if "processed" in str(engine.model_config.logprobs_mode) else "raw"
        self.max_model_len: int = engine.model_config.max_model_len
        """Context length in tokens."""
        self._counter = counter
        self._live: set[Exchange] = set()
        """The exchanges that are not settled."""
        self.cut_requests = 0
        """Client requests that `end_all` stopped."""
        self.internal_calls = 0
        """Those of the server's own requests that are calls, which are captured and exported: canaries."""
        self.unnamed_calls = 0
        """Client requests that named no rollout."""
        self.forced_requests = 0
        """Generations that were answered with stored tokens."""
        self._replayer = Replayer(engine)
        self._constraints = EngineConstraints(engine, self._generate)
        self._under_way: dict[int, tuple[Exchange, Generation]] = {}
        """`id()` of the parameters given to the engine → exchange and generation."""
        self._watch(engine.input_processor)
        OfferedTools(engine.renderer, self._note_tools)
        engine.generate = self.generate

    @property
    def internal_requests(self) -> int:
        """Requests to the engine that the server itself has made: canaries, and the one that fixes the grammar library."""
        return self.internal_calls + self._constraints.requests

    @staticmethod
    def _note_tools(tools: str) -> None:
        if (exchange := _CURRENT.get()) is not None:
            exchange.tools = tools

    def _watch(self, processor: Any) -> None:
        """Keeps the final parameters that the engine's own processing derives for each generation that it accepts."""
        at_once, in_thread = processor.process_inputs, processor.process_inputs_async

        def note(params: Any, request: Any) -> Any:
            if (under_way := self._under_way.get(id(params))) is not None:
                exchange, generation = under_way
                generation.final = request.sampling_params
                self._accept(exchange, generation)
            return request

        def process_inputs(request_id: str, prompt: Any, params: Any, *rest: Any, **options: Any) -> Any:
            return note(params, at_once(request_id, prompt, params, *rest, **options))

        async def process_inputs_async(request_id: str, prompt: Any, params: Any, *rest: Any, **options: Any) -> Any:
            return note(params, await in_thread(request_id, prompt, params, *rest, **options))

        processor.process_inputs, processor.process_inputs_async = process_inputs, process_inputs_async

    @contextlib.contextmanager
    def exchange(self, exchange: Exchange) -> Iterator[None]:
        """Assigns generations started in this block, and in tasks started in it, to `exchange`."""
        self._live.add(exchange)
        exchange.when_settled(lambda: self._live.discard(exchange))
        exchange.when_settled(lambda: self._emit(exchange))
        token = _CURRENT.set(exchange)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def end_all(self, why: str) -> None:
        """Stops every live exchange: it passes on no more output and starts no generation; its client gets an error.

        Generations in the engine keep running; see `Engine.abort`.
        """
        for exchange in self._live:
            exchange.ended_because = exchange.ended_because or why

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Replaces the engine client's `generate`; passes the outputs through unchanged."""
        exchange = _CURRENT.get()
        if exchange is None or not isinstance(prompt, dict):
            return self._when_compilable(
                sampling_params, self._generate(prompt, sampling_params, request_id, **options)
            )
        identity = exchange.caller.identity
        temperature = self._temperatures.get(identity.split) if identity else None
        if temperature is not None:
            sampling_params = override_sampling(sampling_params, temperature)
        sampling_params = with_logprobs(sampling_params)  # a copy: several prompts may share one object
        if exchange.branch is not None and sampling_params.seed is not None:
            sampling_params.seed = exchange.branch.own_seed(sampling_params.seed)
        adapter = options.get("lora_request")
        if adapter is None and exchange.policy.adapter:
            options["lora_request"] = exchange.policy.adapter.request
        if not self._has_priorities and not exchange.internal:
            options["priority"] = 0
        generation = Generation(
            prompt, sampling_params, request_id, exchange.choices, exchange.policy, adapter, options
        )
        exchange.choices += sampling_params.n
        outputs = self._stored(exchange, generation, prompt, sampling_params, request_id, options)
        if outputs is None:
            sampled = self._generate(prompt, sampling_params, request_id, **options)
            outputs = self._when_compilable(sampling_params, sampled)
        return self._observe(exchange, generation, sampling_params, outputs)

    def _stored(
        self,
        exchange: Exchange,
        generation: Generation,
        prompt: Any,
        params: Any,
        request_id: str,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Any, None] | None:
        """Returns the outputs of a stored call, None if the engine is to be asked. Raises vLLM's error for a 422."""
        if exchange.branch is None:
            return None
        ids = prompt.get("prompt_token_ids") if prompt.get("type") == "token" else None
        try:
            generation.forced = exchange.branch.next_answer(ids, params)
        except DivergedError as error:
            exchange.ended_because, exchange.ended_status, exchange.is_cut = str(error), 422, True
            raise _unprocessable(str(error)) from None
        if generation.forced is None:
            return None
        self.forced_requests += 1
        return self._replayer.outputs(generation.forced, prompt, params, request_id, options.get("lora_request"))

    async def _when_compilable(self, params: Any, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yields the outputs of a generation; one with a grammar starts once that is known to be compiled soon."""
        try:
            if getattr(params, "structured_outputs", None) is not None:
                await self._constraints.fix_library()
                await self._constraints.check(params)
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def _observe(
        self, exchange: Exchange, generation: Generation, params: Any, outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        if exchange.ended_because:
            raise self._cut(exchange, exchange.ended_because)
        exchange.begin_generation()
        self._live.add(exchange)
        self._under_way[id(params)] = exchange, generation
        try:
            async for output in outputs:
                if exchange.ended_because:
                    raise self._cut(exchange, exchange.ended_because)
                self._accept(exchange, generation)  # at the latest: another vLLM's processing may be bypassed
                generation.add(output)
                yield output
        finally:
            try:
                await outputs.aclose()
            finally:
                del self._under_way[id(params)]
                exchange.end_generation()
                if exchange.is_settled:
                    self._live.discard(exchange)

    def _accept(self, exchange: Exchange, generation: Generation) -> None:
        """Makes a generation a call; one that the engine refuses is none."""
        if generation.accepted:
            return
        generation.accepted = True
        if exchange.call_index is None:
            key = exchange.caller.counter_key
            exchange.call_index = 0 if key is None else self._counter.next(key)
            self.unnamed_calls += key is None and not exchange.internal
        exchange.generations.append(generation)
        self.internal_calls += exchange.internal

    def _cut(self, exchange: Exchange, why: str) -> Exception:
        """Returns the error that vLLM answers with 503, or with an error event if the stream has started."""
        from vllm.exceptions import RetryableRequestError

        if not exchange.is_cut:
            exchange.is_cut = True
            self.cut_requests += not exchange.internal
        return RetryableRequestError(why)

    def _emit(self, exchange: Exchange) -> None:
        end_ns = time.time_ns()
        for generation in exchange.generations:
            try:
                spans = list(self._spans_of(exchange, generation, end_ns))
            except Exception as error:  # noqa: BLE001  # the other generations are still recorded
                _log.error("a call cannot be recorded: %s", one_line(error))
                continue
            for span in spans:
                self._sink(span)

    def _spans_of(self, exchange: Exchange, generation: Generation, end_ns: int) -> Iterator[CallSpan]:
        for choice, attributes in generation.choices(exchange.endpoint, self._constraints):
            attributes.update(self._attributes_of(exchange))
            attributes[keys.CALL_DELIVERED] = exchange.delivered and choice.finished and not exchange.is_cut
            if exchange.is_cut and not choice.finished and exchange.ended_status == 503:
                attributes[keys.GEN_AI_FINISH_REASONS] = [keys.ENDED_BY_SERVER]
            asked, limit = exchange.asked.max_tokens, attributes.get(keys.GEN_AI_MAX_TOKENS)
            if asked is not None and isinstance(limit, int) and asked > limit:
                attributes[keys.ASKED_MAX_TOKENS] = asked
            index = attributes[keys.CHOICE_INDEX]
            if isinstance(index, int) and (ids := exchange.tool_calls.get(index)):
                attributes[keys.CALL_TOOL_CALLS] = list(ids)
            if generation.adapter is None:
                attributes[keys.POLICY_NAME] = exchange.policy.name
            if exchange.policy.base:
                attributes[keys.POLICY_BASE] = exchange.policy.base
            operation = str(attributes[keys.GEN_AI_OPERATION])
            yield CallSpan(
                trace_id=exchange.trace_id,
                span_id=secrets.token_hex(8) if attributes[keys.CHOICE_INDEX] else exchange.span_id,
                parent_span_id=exchange.caller.parent.span_id if exchange.caller.parent else None,
                name=f"{operation} {self._served_name}",
                start_ns=exchange.start_ns,
                end_ns=end_ns,
                attributes=attributes,
                error=None if choice.finished else exchange.ended_because or "the generation did not finish",
                link=exchange.caller.link,
                is_sampled=exchange.caller.parent.sampled if exchange.caller.parent else True,
            )

    def _attributes_of(self, exchange: Exchange) -> dict[str, AttributeValue]:
        caller = exchange.caller
        attributes: dict[str, AttributeValue] = {
            keys.GEN_AI_PROVIDER: "vllm",
            keys.GEN_AI_REQUEST_MODEL: self._served_name,
            keys.GEN_AI_RESPONSE_MODEL: self._served_name,
            keys.LOGPROBS_MODE: self._logprobs_mode,
            keys.CALL_INDEX: exchange.call_index or 0,
            keys.CALL_SIGNED: caller.is_signed,
            keys.CALL_SERVER: self._counter.instance,
            keys.CALL_ENDPOINT: exchange.endpoint,
            **(caller.identity.attributes() if caller.identity else {}),
        }
        if caller.agent:
            attributes[keys.GEN_AI_AGENT_NAME] = caller.agent
        if exchange.asked.kind:
            attributes[keys.CALL_KIND], attributes[keys.CALL_KIND_RULE] = exchange.asked.kind
        if exchange.asked.tool_results:
            attributes[keys.CALL_TOOL_RESULTS] = results_to_json(exchange.asked.tool_results)
        if exchange.tools:
            attributes[keys.GEN_AI_TOOL_DEFINITIONS] = exchange.tools
        if caller.client:
            attributes[keys.USER_AGENT] = caller.client
        if caller.has_our_clock:
            attributes[keys.CALL_SAME_CLOCK] = True
        for key, value in caller.notes:
            attributes[key] = value.lower() == "true" if key == keys.NO_BOUNDARY else value
        if exchange.internal:
            attributes[keys.CALL_INTERNAL] = True
        return attributes


def _unprocessable(why: str) -> Exception:
    """Returns the error that vLLM answers with 422, which clients do not send again."""
    from vllm.exceptions import GracefulHTTPError

    return GracefulHTTPError(why, HTTPStatus.UNPROCESSABLE_ENTITY)

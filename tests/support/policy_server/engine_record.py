"""An independent record of the generations of vLLM's engine: test middleware, innermost around `engine.generate`.

Writes one JSON line per finished choice to the file named by ENGINE_RECORD. It shares no code with capture: the
log-probability of a token is looked up by the token's own id. With ENGINE_SEEDED, a request without a seed gets one derived
from its prompt, so equal prompts get equal answers.
"""

import contextvars
import json
import os
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
_client: contextvars.ContextVar[str] = contextvars.ContextVar("client", default="")


class EngineRecorder:
    """`--middleware tests.support.policy_server.engine_record.EngineRecorder`, after ours, so that it is closest to the engine."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._file = open(os.environ["ENGINE_RECORD"], "a", buffering=1)  # noqa: SIM115 - as long as the server

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, self._starting(scope, receive), send)
            return
        headers = dict(scope.get("headers", ()))
        key = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        _client.set(key.decode().removeprefix("Bearer "))
        await self._app(scope, receive, send)

    def _starting(self, scope: Message, receive: Callable[[], Awaitable[Message]]) -> Callable[[], Awaitable[Message]]:
        async def start() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                engine = scope["app"].state.engine_client
                engine.generate = self._recorded(engine.generate)
            return message

        return start

    def _recorded(self, generate: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Any]:
        async def recorded(
            prompt: Any, sampling_params: Any, request_id: str, **options: Any
        ) -> AsyncGenerator[Any, None]:
            ids: dict[int, list[int]] = {}
            logprobs: dict[int, list[float]] = {}
            delta = sampling_params.output_kind.name == "DELTA"
            if os.environ.get("ENGINE_SEEDED") and sampling_params.seed is None:
                sampling_params.seed = zlib.crc32(json.dumps(prompt["prompt_token_ids"]).encode())
            async for output in generate(prompt, sampling_params, request_id, **options):
                for choice in output.outputs:
                    if not delta:
                        ids[choice.index], logprobs[choice.index] = [], []
                    ids.setdefault(choice.index, []).extend(choice.token_ids)
                    values = logprobs.setdefault(choice.index, [])
                    for token, position in zip(choice.token_ids, choice.logprobs or (), strict=False):
                        values.append(position[token].logprob)
                    if choice.finish_reason is not None:
                        self._write(output, request_id, choice, ids[choice.index], values)
                yield output

        return recorded

    def _write(self, output: Any, request_id: str, choice: Any, ids: list[int], logprobs: list[float]) -> None:
        record = {
            "client": _client.get(),
            "request_id": request_id,
            "choice": choice.index,
            "prompt_ids": list(output.prompt_token_ids),
            "completion_ids": ids,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        self._file.write(json.dumps(record) + "\n")

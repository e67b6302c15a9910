"""Makes vLLM's outputs from stored tokens: its own output processor gets them instead of the engine's.

Detokenization, stop strings, log-probabilities, several choices and streaming are therefore vLLM's; only the model and
the scheduler, which decide the tokens and the end of a generation, are not asked.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from copy import copy
from typing import Any

from trainspan_schemas.telemetry.prefix import ForcedChoice
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs
from trainspan_serving.forcing.branch import ForcedAnswer

__all__ = ["Replayer"]

_TOKENS_AT_ONCE = 256
"""Tokens processed without letting other requests run; a stream gets them one by one, as from the engine."""


class Replayer:
    """Answers in place of the engine client's `generate`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def outputs(
        self, answer: ForcedAnswer, prompt: Any, params: Any, request_id: str, lora_request: Any
    ) -> AsyncGenerator[Any, None]:
        """Yields RequestOutputs as `generate` does. Raises what vLLM raises for an invalid request."""
        from vllm.renderers.inputs.preprocess import extract_prompt_components
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
        from vllm.v1.engine.parallel_sampling import ParentRequest

        engine = self._engine
        request = engine.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            supported_tasks=await engine.get_supported_tasks(),
            lora_request=lora_request,
        )
        text, _, _ = extract_prompt_components(engine.model_config, prompt)
        engine.input_processor.assign_request_id(request)
        original = engine.output_processor
        processor = OutputProcessor(original.tokenizer, log_stats=False, stream_interval=original.stream_interval)
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        parent = ParentRequest(request) if params.n > 1 else None
        step = 1 if params.output_kind.name == "DELTA" else _TOKENS_AT_ONCE
        parts = []
        for index, choice in enumerate(answer.choices):
            child = request
            if parent is not None:
                child = copy(request)
                child.request_id, child.sampling_params = parent.get_child_info(index)
            processor.add_request(child, text, parent, index, queue)
            parts.append(_engine_outputs(child, choice, step))
        label = None if answer.version is None else str(answer.version)
        while parts:
            steps = [(part, next(part, None)) for part in parts]
            parts = [part for part, output in steps if output is not None]
            processor.process_outputs([output for _, output in steps if output is not None], weight_version=label)
            if (output := queue.get_nowait()) is not None:
                yield output
            await asyncio.sleep(0)


def _engine_outputs(request: Any, choice: ForcedChoice, step: int) -> Iterator[Any]:
    """Yields what the engine's core would report about one choice."""
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    ids, logprobs = decode_ids(choice.ids), decode_logprobs(choice.logprobs)
    reason, stop_reason = _end_of(choice, ids[-1], request.sampling_params)
    for start in range(0, len(ids), step):
        new, scores = ids[start : start + step], logprobs[start : start + step]
        is_last = start + step >= len(ids)
        yield EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new,
            new_logprobs=LogprobsLists(
                np.array(new, dtype=np.int64)[:, None],
                np.array(scores, dtype=np.float32)[:, None],
                np.ones(len(new), dtype=np.int64),
            ),
            finish_reason=FinishReason[reason] if is_last and reason else None,
            stop_reason=stop_reason if is_last else None,
        )
    if reason is None:  # unless a stop string, which the output processor finds, has ended it before
        yield EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.STOP)


def _end_of(choice: ForcedChoice, last: int, params: Any) -> tuple[str | None, int | str | None]:
    """The finish and stop reason that the engine's core reports; a stop string is no concern of the core (None)."""
    if choice.finish_reason != "stop":
        return choice.finish_reason.upper(), "repetition_detected" if choice.finish_reason == "repetition" else None
    if last == params.eos_token_id:
        return "STOP", None
    if last in (params.stop_token_ids or ()):
        return "STOP", last
    return None, None

"""Which generations are calls, and that one which cannot be recorded costs no other."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_schemas.telemetry.tokens import decode_ids
from trainspan_serving.capture.call_counter import CallCounter
from trainspan_serving.capture.caller import Caller
from trainspan_serving.capture.engine_tap import EngineTap, Exchange
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.export.call_span import CallSpan

PARENT = TraceParent("ab" * 16, "cd" * 8)


class FakeEngine:
    """Refuses the prompt [0], and answers others with their own last token."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(logprobs_mode="processed_logprobs", max_model_len=1024)
        self.vllm_config = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend="xgrammar"))
        self.renderer = SimpleNamespace(render_messages_async=None)
        self.input_processor = SimpleNamespace(process_inputs=self._process, process_inputs_async=None)

    @staticmethod
    def _process(_: str, prompt: Any, params: Any) -> Any:
        if prompt["prompt_token_ids"] == [0]:
            raise ValueError("refused")
        return SimpleNamespace(sampling_params=params)

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.input_processor.process_inputs(request_id, prompt, params)
        ids = prompt["prompt_token_ids"]
        done = SimpleNamespace(index=0, token_ids=ids[-1:], logprobs=None, finish_reason="stop", weight_versions=None)
        yield SimpleNamespace(prompt_token_ids=ids, outputs=[done])


def recorded(folder: Path, *requests: list[list[int]]) -> list[CallSpan]:
    """The spans of requests with these prompts."""
    engine: Any = FakeEngine()
    spans: list[CallSpan] = []
    tap = EngineTap(engine, "policy", spans.append, CallCounter(folder / "calls"), temperatures={})

    async def ask(prompts: list[list[int]]) -> None:
        caller = Caller(PARENT, None, None)
        exchange = Exchange(caller, "/v1/completions", ServedPolicy("policy", 0, folder))
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
        with tap.exchange(exchange):
            for number, ids in enumerate(prompts):
                try:
                    async for _ in engine.generate({"type": "token", "prompt_token_ids": ids}, params, f"id-{number}"):
                        pass
                except ValueError:
                    pass
        exchange.end_http(delivered=True)

    for prompts in requests:
        asyncio.run(ask(prompts))
    return spans


def test_a_generation_that_the_engine_refuses_is_no_call_and_takes_no_number(tmp_path: Path) -> None:
    spans = recorded(tmp_path, [[0]], [[1, 5]], [[0], [1, 6]])
    assert [(one.attributes[keys.CALL_INDEX], one.attributes[keys.GEN_AI_INPUT_TOKENS]) for one in spans] == [
        (0, 2),
        (1, 2),
    ]


def test_a_generation_that_cannot_be_encoded_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spans = recorded(tmp_path, [[1, 5], [2**32], [1, 7]])
    assert [decode_ids(one.attributes[keys.PROMPT_TOKEN_IDS]) for one in spans] == [[1, 5], [1, 7]]  # type: ignore[arg-type]
    assert caplog.text.count("a call cannot be recorded") == 1


def test_the_first_choice_is_the_call_that_the_response_names_and_the_others_have_ids_of_their_own(
    tmp_path: Path,
) -> None:
    engine: Any = FakeEngine()
    spans: list[CallSpan] = []
    tap = EngineTap(engine, "policy", spans.append, CallCounter(tmp_path / "calls"), temperatures={})
    caller = Caller(PARENT, None, None, has_our_clock=True)
    exchange = Exchange(caller, "/v1/completions", ServedPolicy("policy", 0, tmp_path))

    async def ask() -> None:
        with tap.exchange(exchange):
            for number in range(2):
                params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
                prompt = {"type": "token", "prompt_token_ids": [1, number]}
                async for _ in engine.generate(prompt, params, f"id-{number}"):
                    pass

    asyncio.run(ask())
    exchange.end_http(delivered=True)
    assert [one.attributes[keys.CHOICE_INDEX] for one in spans] == [0, 1]
    assert spans[0].span_id == exchange.span_id != spans[1].span_id
    assert spans[0].attributes[keys.CALL_SAME_CLOCK] is True

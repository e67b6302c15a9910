"""What a generation asks vLLM for, and how it is recorded, also if vLLM's internal parameters have changed."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams

from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import obstacle_of
from trainspan_schemas.telemetry.tokens import decode_logprobs
from trainspan_serving.capture.generation import Generation, override_sampling, with_logprobs
from trainspan_serving.checkpoints.served_policy import ServedPolicy

PARAMS: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "top_k"), 0),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "seed", "max_tokens")),
    **dict.fromkeys(("thinking_token_budget", "trace_decode_token_ids", "logprob_token_ids")),
    "n": 1,
    "output_kind": SimpleNamespace(name="FINAL_ONLY"),
    "structured_outputs": SimpleNamespace(choice=None),
}


class Unknown:
    """The constraints of a vLLM with different internals."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads

    vocab_size = 10

    def read(self, *_: Any) -> Any:
        raise AttributeError("no such parameter")

    def start(self, *_: Any) -> int:
        if not self._reads:
            raise AttributeError("no such method")
        return 0


@pytest.mark.parametrize(("reads", "name"), [(True, "unreadable"), (False, "reasoning")])
def test_a_call_whose_constraint_cannot_be_read_is_still_recorded(reads: bool, name: str, tmp_path: Any) -> None:
    params = SimpleNamespace(**PARAMS)
    generation = Generation({"prompt_token_ids": [1]}, params, "id", 0, ServedPolicy("policy", 0, tmp_path), None, {})
    generation.final = params
    constraints: Any = Unknown(reads=reads)
    ((_, attributes),) = generation.choices("/v1/chat/completions", constraints)
    assert attributes[keys.SAMPLING_CONSTRAINED] is True
    assert obstacle_of(True, attributes[keys.SAMPLING_CONSTRAINT]) == f"constrained:{name}"


def test_the_sampled_tokens_logprobs_are_recorded_next_to_those_of_named_tokens(tmp_path: Any) -> None:
    asked = SamplingParams(logprob_token_ids=[3, 4], output_kind=RequestOutputKind.FINAL_ONLY)
    params = with_logprobs(asked)
    assert (params.logprobs, params.num_logprobs) == (None, 2)  # vLLM refuses any other number
    assert with_logprobs(SamplingParams()).logprobs == 0
    generation = Generation({"prompt_token_ids": [1]}, params, "id", 0, ServedPolicy("policy", 0, tmp_path), None, {})
    positions = [{9: Logprob(-0.5, 1), 3: Logprob(-2.0, 1), 4: Logprob(-3.0, 2)}, {4: Logprob(-1.0, 2)}]
    done = SimpleNamespace(index=0, token_ids=[9, 4], logprobs=positions, finish_reason="stop", weight_versions=None)
    generation.add(SimpleNamespace(prompt_token_ids=[1], outputs=[done]))
    constraints: Any = Unknown(reads=True)
    ((_, attributes),) = generation.choices("/v1/completions", constraints)
    assert decode_logprobs(attributes[keys.COMPLETION_LOGPROBS]) == [-0.5, -1.0]


@pytest.mark.parametrize(("n", "expected"), [(1, (0.0, 0)), (3, (1.0, 1))])
def test_greedy_validation_also_answers_requests_for_several_choices(n: int, expected: tuple[float, int]) -> None:
    params = override_sampling(SamplingParams(n=n, temperature=0.7, top_p=0.5, presence_penalty=1.0), 0.0)
    assert (params.temperature, params.top_k) == expected
    assert (params.n, params.top_p, params.presence_penalty) == (n, 1.0, 0.0)


@pytest.mark.parametrize(("asked", "recorded"), [(0, 0), (-1, 0), (9, 9), (10, 0), (2**31, 0)])
def test_a_top_k_of_the_whole_vocabulary_is_no_truncation(asked: int, recorded: int, tmp_path: Any) -> None:
    params = SamplingParams(top_k=asked, output_kind=RequestOutputKind.FINAL_ONLY)
    generation = Generation({"prompt_token_ids": [1]}, params, "id", 0, ServedPolicy("policy", 0, tmp_path), None, {})
    constraints: Any = Unknown(reads=True)
    done = SimpleNamespace(index=0, token_ids=[], logprobs=None, finish_reason="stop", weight_versions=None)
    generation.add(SimpleNamespace(prompt_token_ids=[1], outputs=[done]))
    ((_, attributes),) = generation.choices("/v1/completions", constraints)
    assert attributes[keys.GEN_AI_TOP_K] == recorded

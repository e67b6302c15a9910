"""What a generation asks vLLM for, and how it is recorded, also if vLLM's internal parameters have changed."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams

from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.constraints import Constraint, obstacle_of
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs
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


class Known:
    """The constraints of an engine that can say them, and what it was asked."""

    vocab_size = 10

    def __init__(self, start: int | None) -> None:
        self._start = start
        self.asked: list[Any] = []

    def read(self, *asked: Any) -> Constraint:
        self.asked.append(asked)
        return Constraint(bad_words=((7,),), others=("tokenizer",))

    def start(self, *asked: Any) -> int | None:
        self.asked.append(asked)
        return self._start


def _output(index: int, ids: list[int], finish: str | None, versions: Any = None) -> Any:
    logprobs = [{token: Logprob(-token / 2, 1)} for token in ids]
    done = SimpleNamespace(
        index=index, token_ids=ids, logprobs=logprobs, finish_reason=finish, weight_versions=versions
    )
    return SimpleNamespace(prompt_token_ids=None, outputs=[done])


def test_each_choice_of_a_call_is_recorded_with_all_that_it_was_sampled_by(tmp_path: Any) -> None:
    numbers: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
        "max_tokens": 12,
    }
    params = SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY, **numbers)
    policy = ServedPolicy("policy", 5, tmp_path)
    generation = Generation({"prompt_token_ids": [1, 2, 3]}, params, "cmpl-a-1", 4, policy, None, {})
    span = SimpleNamespace
    generation.add(
        _output(1, [8, 9, 6], "length", [span(version="7", start=0, end=1), span(version="6", start=1, end=3)])
    )
    constraints: Any = Unknown(reads=True)
    (first, aborted), (second, done) = generation.choices("/v1/completions", constraints)
    assert [first.finished, second.finished] == [False, True]
    shared = {
        keys.GEN_AI_OPERATION: keys.OPERATION_TEXT_COMPLETION,
        keys.GEN_AI_RESPONSE_ID: "cmpl-a",
        keys.GEN_AI_TEMPERATURE: 0.7,
        keys.GEN_AI_TOP_P: 0.9,
        keys.GEN_AI_TOP_K: 4,
        keys.GEN_AI_MIN_P: 0.1,
        keys.GEN_AI_FREQUENCY_PENALTY: 0.2,
        keys.GEN_AI_PRESENCE_PENALTY: 0.3,
        keys.GEN_AI_REPETITION_PENALTY: 1.1,
        keys.SAMPLING_CONSTRAINED: True,
        keys.GEN_AI_SEED: 11,
        keys.GEN_AI_MAX_TOKENS: 12,
        keys.GEN_AI_INPUT_TOKENS: 3,
    }
    tokens = (keys.PROMPT_TOKEN_IDS, keys.COMPLETION_TOKEN_IDS, keys.COMPLETION_LOGPROBS)
    for attributes, ids in ((aborted, []), (done, [8, 9, 6])):
        prompt, completion, logprobs = (attributes.pop(name) for name in tokens)
        assert (decode_ids(prompt), decode_ids(completion)) == ([1, 2, 3], ids)
        assert decode_logprobs(logprobs) == [-token / 2 for token in ids]
    assert aborted == {
        **shared,
        keys.POLICY_VERSION: 5,
        keys.CHOICE_INDEX: 4,
        keys.GEN_AI_OUTPUT_TOKENS: 0,
        keys.GEN_AI_FINISH_REASONS: ["abort"],
    }
    assert done == {
        **shared,
        keys.POLICY_VERSION: 6,
        keys.POLICY_VERSION_SPANS: "[[7, 0, 1], [6, 1, 3]]",
        keys.POLICY_SWAP_CACHE: keys.CACHE_RECOMPUTED,
        keys.CHOICE_INDEX: 5,
        keys.GEN_AI_OUTPUT_TOKENS: 3,
        keys.GEN_AI_FINISH_REASONS: ["length"],
    }


def test_the_tokens_of_a_stream_are_joined_and_those_of_a_whole_answer_replaced(tmp_path: Any) -> None:
    for kind, ids in ((RequestOutputKind.DELTA, [4, 5, 6]), (RequestOutputKind.CUMULATIVE, [6])):
        params = SamplingParams(output_kind=kind)
        generation = Generation({"prompt_token_ids": [1]}, params, "id", 0, ServedPolicy("p", 0, tmp_path), None, {})
        generation.add(_output(0, [4, 5], None))
        generation.add(_output(0, [6], "stop"))
        constraints: Any = Unknown(reads=True)
        ((choice, attributes),) = generation.choices("/v1/chat/completions", constraints)
        assert (choice.ids, choice.logprobs) == (ids, [-token / 2 for token in ids])
        assert attributes[keys.GEN_AI_OPERATION] == keys.OPERATION_CHAT


@pytest.mark.parametrize(
    ("request_id", "endpoint", "response_id"),
    [
        ("cmpl-a-0", "/v1/completions", "cmpl-a"),
        ("cmpl-a", "/v1/completions", "cmpl-a"),
        ("cmpl-a-x", "/v1/completions", "cmpl-a-x"),
        ("-0", "/v1/completions", "-0"),
        ("resp_a_1", "/v1/responses", "resp_a"),
        ("resp_a", "/v1/responses", "resp_a"),
        ("chatcmpl-a-0", "/v1/chat/completions", "chatcmpl-a-0"),
    ],
)
def test_a_call_has_the_id_that_its_client_got(request_id: str, endpoint: str, response_id: str, tmp_path: Any) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    generation = Generation({"prompt_token_ids": [1]}, params, request_id, 0, ServedPolicy("p", 0, tmp_path), None, {})
    constraints: Any = Unknown(reads=True)
    ((_, attributes),) = generation.choices(endpoint, constraints)
    assert attributes[keys.GEN_AI_RESPONSE_ID] == response_id


@pytest.mark.parametrize(
    ("request_id", "start", "others"),
    [
        ("id", 0, ["tokenizer"]),
        ("id", 2, ["tokenizer"]),
        ("id", None, ["reasoning", "tokenizer"]),
        ("beam-beam-1", 0, ["beam_search", "tokenizer"]),
    ],
)
def test_a_constraint_is_recorded_with_its_start_and_with_what_else_shaped_the_call(
    request_id: str, start: int | None, others: list[str], tmp_path: Any
) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, logit_bias={3: 1.0})
    options = {"reasoning_ended": True}
    policy = ServedPolicy("p", 0, tmp_path)
    generation = Generation({"prompt_token_ids": [1]}, params, request_id, 0, policy, None, options)
    generation.final = final = params.clone()
    generation.add(_output(0, [4, 5], "stop"))
    constraints: Any = Known(start)
    ((_, attributes),) = generation.choices("/v1/chat/completions", constraints)
    assert Constraint.from_json(attributes[keys.SAMPLING_CONSTRAINT]) == Constraint(
        None, None, (), ((7,),), tuple(others)
    )
    assert attributes.get(keys.CONSTRAINT_START) == (start or None)
    read, started = constraints.asked
    assert read[0] is final
    assert started == ([1], [4, 5], final, options)


def test_a_validations_sampling_replaces_truncation_and_penalties_and_nothing_else() -> None:
    asked = SamplingParams(
        n=3,
        temperature=0.7,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=4,
        max_tokens=5,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        stop=["x"],
    )
    whole = SamplingParams(n=3, temperature=0.25, top_k=0, seed=4, max_tokens=5, stop=["x"])
    assert override_sampling(asked, 0.25) == whole
    assert asked.top_p == 0.5, "the client's own parameters are left as they are"

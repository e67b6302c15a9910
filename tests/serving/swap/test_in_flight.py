"""Swaps in the middle of generations: each token is exactly one of the weights that its span names."""

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.support.servers import Flying, Models, publish_base
from tests.serving.support.traffic import LONG_PROMPT, greedy, metric
from tests.support.models.canary import greedy_ids, logprobs_of
from tests.support.otlp.sink import OtlpSink
from tests.support.policy_server.process import RunningServer
from trainspan_schemas.artifacts.checkpoint import Canary
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs

pytestmark = pytest.mark.ci

TOKENS = 640
Answer = tuple[int, dict[str, Any], dict[str, str]]


@pytest.fixture(autouse=True)
def base(flying: Flying, models: Models) -> None:
    """Version 0 in service."""
    server, _ = flying
    if server.policy()["version"] != 0:
        publish_base(models, models.checkpoints)
        assert server.swap("policy-000000", 0)[0] == 200


def begin(flying: Flying, pool: ThreadPoolExecutor, prompt: list[int], **more: Any) -> "Future[Answer]":
    """Begins a long generation and waits until it has tokens."""
    server, _ = flying
    body = {"model": "policy", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **more}
    before = generated_tokens(server)
    answer = pool.submit(server.post, "/v1/completions", {**body, "return_token_ids": True})
    wait_for_tokens(server, before + 5)
    return answer


def generated_tokens(server: RunningServer) -> float:
    return metric(server, "vllm:generation_tokens_total")


def waiting_requests(server: RunningServer) -> float:
    return metric(server, "vllm:num_requests_waiting{")


def wait_for_tokens(server: RunningServer, total: float) -> None:
    deadline = time.monotonic() + 30
    while generated_tokens(server) < total:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def call_of(sink: OtlpSink, response: dict[str, Any]) -> Any:
    (span,) = sink.wait(1, lambda span: span.attributes.get(keys.GEN_AI_RESPONSE_ID) == response["id"], timeout_s=30)
    return span


def check_tokens(span: Any, models: Models) -> list[tuple[int, int, int]]:
    """Compares each token's log-probability with a forward pass of all tokens before it through its version's weights."""
    spans = [tuple(one) for one in json.loads(span.attributes[keys.POLICY_VERSION_SPANS])]
    prompt, completion = (
        decode_ids(span.attributes[key]) for key in (keys.PROMPT_TOKEN_IDS, keys.COMPLETION_TOKEN_IDS)
    )
    sampled = decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS])
    assert len(completion) == len(sampled) == TOKENS
    assert [(first, end) for _, first, end in spans] == list(
        zip([0, *(end for _, _, end in spans[:-1])], [end for _, _, end in spans], strict=True)
    )
    assert spans[-1][2] == TOKENS
    for version, first, end in spans:
        expected = logprobs_of(models.folder(version), prompt, completion)
        assert list(sampled[first:end]) == pytest.approx(expected[first:end], abs=1e-4)
        others = [other for other in (0, 1, 2) if other != version]
        for other in others:  # the weights differ by far more than that
            foreign = logprobs_of(models.folder(other), prompt, completion)
            assert list(sampled[first:end]) != pytest.approx(foreign[first:end], abs=1e-2)
    return spans


def test_a_generation_across_two_swaps_is_of_three_versions_token_by_token(flying: Flying, models: Models) -> None:
    server, sink = flying
    with ThreadPoolExecutor(2) as pool:
        # One is sampled at temperature 1, one is greedy and has a seed: both go on where they stopped.
        answers = [begin(flying, pool, LONG_PROMPT[:20]), begin(flying, pool, LONG_PROMPT[:50], temperature=0, seed=3)]
        for version in (1, 2):
            wait_for_tokens(server, generated_tokens(server) + 100)
            status, swapped = server.swap(f"policy-{version:06d}", version)
            assert (status, swapped["canary"]["status"]) == (200, "fresh"), swapped
            assert server.policy()["in_flight"] == 2, "they ended before the swap: make them longer"
            assert swapped["seconds"]["drain"] < 2, "it waited for them"
        done = [answer.result(120) for answer in answers]
    for status, response, _ in done:
        assert status == 200, response
        span = call_of(sink, response)
        assert [version for version, _, _ in check_tokens(span, models)] == [0, 1, 2]
        assert span.attributes[keys.POLICY_VERSION] == 0, "the oldest"
        assert span.attributes[keys.POLICY_SWAP_CACHE] == "recomputed"
        assert span.attributes[keys.CALL_DELIVERED] is True
        ids = response["choices"][0]["token_ids"]
        assert decode_ids(span.attributes[keys.COMPLETION_TOKEN_IDS]) == ids
    first, second, _ = json.loads(span.attributes[keys.POLICY_VERSION_SPANS])
    tokens = [*LONG_PROMPT[:50], *ids[: second[1]]]
    assert greedy_ids(models.folder(1), tokens, 4) == ids[second[1] : second[1] + 4]
    assert greedy_ids(models.base, LONG_PROMPT[:50], 4) == ids[first[1] : first[1] + 4]


def test_requests_that_come_during_the_swap_are_held_and_answered_by_the_new_version(
    flying: Flying, models: Models
) -> None:
    server, sink = flying
    stop = threading.Event()
    waits_s: list[float] = []

    def ask() -> None:
        while not stop.is_set():
            began = time.monotonic()
            assert (
                server.post("/v1/completions", {"model": "policy", "prompt": LONG_PROMPT[:20], "max_tokens": 4})[0]
                == 200
            )
            waits_s.append(time.monotonic() - began)

    with ThreadPoolExecutor(3) as pool:
        answer = begin(flying, pool, LONG_PROMPT[:30])
        others = [pool.submit(ask) for _ in range(2)]
        status, swapped = server.swap("policy-000001", 1)
        assert status == 200, swapped
        assert greedy(server) == (greedy_ids(models.folder(1), LONG_PROMPT, 12), "1")
        stop.set()
        for other in others:
            other.result(60)
        assert answer.result(120)[0] == 200
    assert max(waits_s) < swapped["seconds"]["total"] + 2
    assert [version for version, _, _ in check_tokens(call_of(sink, answer.result()[1]), models)] == [0, 1]


def test_a_swap_does_not_wait_for_the_requests_that_wait_in_a_full_engine(flying: Flying, models: Models) -> None:
    server, _ = flying
    with ThreadPoolExecutor(1) as pool:
        # Each prompt is a generation; the engine runs 32 of them at once.
        body = {"model": "policy", "prompt": [LONG_PROMPT[:20]] * 160, "max_tokens": 200, "ignore_eos": True}
        answer = pool.submit(server.post, "/v1/completions", body)
        wait_for_tokens(server, generated_tokens(server) + 100)
        assert waiting_requests(server) > 64
        status, swapped = server.swap("policy-000001", 1)
        assert (status, swapped["canary"]["status"]) == (200, "fresh"), swapped
        assert waiting_requests(server) > 32, "the canary queued behind them"
        assert answer.result(120)[0] == 200


def test_a_swap_that_is_undone_leaves_generations_with_the_earlier_weights(flying: Flying, models: Models) -> None:
    server, sink = flying
    canary = Canary.read(models.folder(1))
    wrong = Canary.read(models.folder(1))
    wrong.prompts[0].logprobs_new[0] += 0.01
    wrong.write(models.folder(1))
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = begin(flying, pool, LONG_PROMPT[:20])
            status, refused = server.swap("policy-000001", 1)
            assert (status, refused["canary"]["status"]) == (409, "stale")
            assert answer.result(120)[0] == 200
    finally:
        canary.write(models.folder(1))
    # While the canary ran, they were at work with the weights that it was about; their numbers say so.
    versions = [version for version, _, _ in check_tokens(call_of(sink, answer.result()[1]), models)]
    assert versions in ([0, 1, 0], [0, 1])
    assert greedy(server) == (greedy_ids(models.base, LONG_PROMPT, 12), "0")

"""Traffic during a swap of the policy, and checks of its responses and spans."""

import contextlib
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.support.otlp.sink import OtlpSink
from tests.support.policy_server.process import RunningServer
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs

__all__ = ["LONG_PROMPT", "check_calls", "greedy", "load", "metric", "wait_for_answers"]

LONG_PROMPT = [(13 * position) % 240 + 10 for position in range(300)]  # more than nine blocks of 32 tokens

Answers = Mapping[str, tuple[int, str]]
"""Response id → status and the policy version in the response header."""


def metric(server: RunningServer, name: str) -> float:
    """The sum of the server's metrics whose names begin so."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split(" ")[1]) for line in lines if line.startswith(name))


def greedy(server: RunningServer, tokens: int = 12) -> tuple[list[int], str]:
    """Returns the completion of the long prompt, and the version in the response header."""
    body = {"model": "policy", "prompt": LONG_PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status, answer, headers = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], headers[keys.HEADER_POLICY_VERSION]


@contextlib.contextmanager
def load(server: RunningServer, prompt_tokens: int) -> Iterator[Answers]:
    """Runs six clients that request completions of prompts of about that length until the block ends."""
    stop = threading.Event()
    answers: dict[str, tuple[int, str]] = {}

    def work(seed: int) -> None:
        number = 0
        while not stop.is_set():
            prompt = [*LONG_PROMPT[: prompt_tokens + seed], number % 200 + 10]
            body = {"model": "policy", "prompt": prompt, "max_tokens": 24, "seed": seed * 1000 + number}
            status, answer, headers = server.post("/v1/completions", body)
            answers[answer.get("id", f"{seed}.{number}")] = (status, headers.get(keys.HEADER_POLICY_VERSION, ""))
            number += 1

    clients = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for client in clients:
        client.start()
    try:
        yield answers
    finally:
        stop.set()
        for client in clients:
            client.join(60)


def wait_for_answers(answers: Answers, more: int) -> None:
    """Waits until the clients of `load` have so many more answers."""
    wanted, deadline = len(answers) + more, time.monotonic() + 60
    while len(answers) < wanted:
        assert time.monotonic() < deadline, f"{len(answers)} of {wanted} answers"
        time.sleep(0.01)


def check_calls(
    sink: OtlpSink, answers: Answers, logprobs: Callable[[int, list[int], list[int]], list[float]], sample: int
) -> None:
    """Checks that no request failed, no call mixes versions, each names its version, and some really used it.

    `logprobs(version, prompt, completion)` computes them independently.
    """
    assert {status for status, _ in answers.values()} == {200}
    spans = sink.wait(len(answers), lambda span: span.attributes.get(keys.GEN_AI_RESPONSE_ID) in answers, timeout_s=30)
    assert len(spans) == len(answers)
    for span in spans:
        assert str(span.attributes[keys.POLICY_VERSION]) == answers[span.attributes[keys.GEN_AI_RESPONSE_ID]][1]
        assert keys.POLICY_VERSION_SPANS not in span.attributes
        assert span.attributes[keys.POLICY_NAME] == "policy"
    for span in random.Random(0).sample(spans, sample):
        prompt, completion = (
            decode_ids(span.attributes[key]) for key in (keys.PROMPT_TOKEN_IDS, keys.COMPLETION_TOKEN_IDS)
        )
        expected = logprobs(span.attributes[keys.POLICY_VERSION], prompt, completion)
        assert decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS]) == pytest.approx(expected, abs=1e-4)

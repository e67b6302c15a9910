"""The recorded constraint of a call lets the trainer's own library reproduce the server's log-probabilities."""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.serving.capture.test_capture import Caller
from tests.serving.support.servers import FLAGS, Models, Plain, Stack
from tests.support.models.tiny_model import make_tiny_model, with_thinking
from tests.support.otlp.sink import ReceivedSpan, otlp_sink
from tests.support.policy_server.constrained import Scorer, constraint, logged
from tests.support.policy_server.process import policy_server
from trainspan_loop.clients.policy_server import PolicyClient
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_schemas.telemetry.tokens import decode_ids
from trainspan_training.model.loading import load_tokenizer

pytestmark = pytest.mark.usefixtures("base_policy")

MESSAGES: Any = [{"role": "user", "content": "7*5 of the answer"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "side": {"enum": ["left", "right"]},
        "many": {"type": "integer"},
        "text": {"type": "string", "maxLength": 6},
    },
    "required": ["side", "many", "text"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}},
    "required": ["side"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "turn", "parameters": PLACE}}
STRICT = {"type": "function", "function": {"name": "turn", "strict": True, "parameters": PLACE}}
TRIGGERED = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["a", "e"],
        "tags": [
            {"begin": first, "content": {"type": "json_schema", "json_schema": PLACE}, "end": "z"}
            for first in ("a{", "er")
        ],
    },
}
LARK = 'start: "a" INT\nINT: /[0-9]+/\n'

ASKED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "json_schema": (
        ["json_schema"],
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    "json_object": (["json_object"], {"response_format": {"type": "json_object"}}),
    "required tool": (["structural_tag"], {"tools": [TOOL], "tool_choice": "required"}),
    "named tool": (
        ["structural_tag"],
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "turn"}}},
    ),
    "strict tool or json": (
        ["structural_tag"],
        {
            "tools": [STRICT],
            "tool_choice": "auto",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    "triggered tag": (["structural_tag"], {"response_format": TRIGGERED}),
    "regex": (["regex"], {"extra_body": {"structured_outputs": {"regex": "[0-9]{2,5}(ab|cd)*"}}}),
    "choice": (["choice"], {"extra_body": {"structured_outputs": {"choice": ["yes", "no", "yes and no"]}}}),
    "grammar": (
        ["grammar"],
        {"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" [b-f]+ rest\nrest ::= "z" | "y" rest'}}},
    ),
    "lark": (["grammar"], {"extra_body": {"structured_outputs": {"grammar": LARK}}}),
    "allowed tokens": (["allowed_token_ids"], {"extra_body": {"allowed_token_ids": [2, 40, 41, 42, 43, 44, 90, 100]}}),
    "logit bias": (["logit_bias"], {"logit_bias": {"40": 9.5, "41": -100, "2": 3}}),
    "bad words": (["bad_words"], {"extra_body": {"bad_words": ["the", "a", "of the"]}}),
    "all together": (
        ["regex", "allowed_token_ids", "logit_bias", "bad_words"],
        {
            "logit_bias": {"20": 2, "21": -3},
            "extra_body": {
                "structured_outputs": {"regex": "[0-9]{2,30}"},
                "allowed_token_ids": [2, *range(15, 27)],
                "bad_words": ["12", "3"],
            },
        },
    ),
}
FAST = ("json_schema", "required tool", "choice", "all together")


@pytest.fixture
def caller(stack: Stack) -> Caller:
    return Caller(stack)


@pytest.fixture(scope="module")
def scorer(models: Models) -> Iterator[Scorer]:
    scorer = Scorer(models.base)
    yield scorer
    scorer.replayer.close()


def agree(spans: list[ReceivedSpan], scorer: Scorer) -> float:
    """Returns the maximum |Δ log-probability|; checks that they disagree without the constraint."""
    apart, free = [], []
    for span in spans:
        (limits,) = scorer.replayed(span)
        ours, theirs = scorer.logprobs(span, limits), logged(span)
        assert np.all(ours[limits.forced()] == 0.0)
        apart.append(float(np.abs(ours - theirs).max()))
        free.append(float(np.abs(scorer.logprobs(span, None) - theirs).max()))
    assert max(free) > 1e-3
    return max(apart)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ASKED]
)
def test_server_and_trainer_agree_under_every_constraint(name: str, caller: Caller, scorer: Scorer) -> None:
    kinds, asked = ASKED[name]
    create: Any = caller.client.chat.completions.create
    for stream in (False, True):
        answer = create(model="policy", messages=MESSAGES, max_tokens=48, n=2, temperature=0.8, stream=stream, **asked)
        if stream:
            for _ in answer:
                pass
    spans = caller.spans(4)
    assert [constraint(span).kinds for span in spans] == [kinds] * 4
    assert {span.attributes[keys.SAMPLING_CONSTRAINED] for span in spans} == {True}
    assert agree(spans, scorer) < 1e-4
    for span, ours in zip(spans, scorer.tree_logprobs(spans), strict=True):
        assert float(np.abs(ours - logged(span)).max()) < 1e-4


def test_a_strict_tool_is_recorded_as_the_tag_that_the_engine_got(caller: Caller, scorer: Scorer) -> None:
    """Random weights hardly ever start a tool call, and only the call is masked."""
    create: Any = caller.client.chat.completions.create
    create(model="policy", messages=MESSAGES, max_tokens=24, tools=[STRICT], tool_choice="auto")
    (span,) = caller.spans(1)
    grammar = constraint(span).grammar
    assert grammar
    assert (grammar.kind, grammar.form) == ("structural_tag", "structural_tag")
    assert "<tool_call>" in grammar.spec
    assert float(np.abs(scorer.logprobs(span, *scorer.replayed(span)) - logged(span)).max()) < 1e-4


@pytest.mark.slow
def test_without_strict_tools_a_strict_tool_does_not_constrain_the_answer(models: Models, tmp_path: Path) -> None:
    free = {"TRAINSPAN_SERVING__STRICT_TOOLS": "false"}
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": 16, "tools": [STRICT], "tool_choice": "auto"}
    with (
        otlp_sink() as (sink, url),
        policy_server(models.base, tmp_path / "home", "--collector", url, flags=FLAGS, environment=free) as server,
    ):
        assert server.post("/v1/chat/completions", body)[0] == 200
        assert server.post("/v1/chat/completions", {**body, "tool_choice": "required"})[0] == 200
        spans = sink.wait(2, lambda span: keys.COMPLETION_TOKEN_IDS in span.attributes)
    assert [keys.SAMPLING_CONSTRAINT in span.attributes for span in spans] == [False, True]


def test_every_endpoint_records_what_its_engine_used(caller: Caller, scorer: Scorer) -> None:
    caller.client.responses.create(
        model="policy",
        input="7",
        max_output_tokens=40,
        text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    )
    caller.client.completions.create(
        model="policy",
        prompt=["calc", "7"],
        max_tokens=20,
        logprobs=1,
        extra_body={"structured_outputs": {"choice": ["of", "the"]}},
    )
    spans = caller.spans(3)
    assert spans[0].attributes[keys.CALL_ENDPOINT] == "/v1/responses"
    assert agree(spans, scorer) < 1e-4


def test_a_call_that_is_free_has_no_constraint_and_what_cannot_be_replayed_is_named(caller: Caller) -> None:
    create: Any = caller.client.chat.completions.create
    create(model="policy", messages=MESSAGES, max_tokens=8, tools=[TOOL])
    create(model="policy", messages=MESSAGES, max_tokens=8, extra_body={"min_tokens": 4})
    create(
        model="policy",
        messages=MESSAGES,
        max_tokens=8,
        response_format={"type": "json_object"},
        extra_body={"min_tokens": 4},
    )
    free, shaped, both = caller.spans(3)
    assert keys.SAMPLING_CONSTRAINT not in free.attributes
    assert (constraint(shaped).kinds, constraint(shaped).obstacle) == (["min_tokens"], "min_tokens")
    assert (constraint(both).kinds, constraint(both).obstacle) == (["json_object", "min_tokens"], "min_tokens")
    whole = json.loads(both.attributes[keys.SAMPLING_CONSTRAINT])["grammar"]
    assert (whole["library"], whole["any_whitespace"], whole["stop_ids"]) == ("xgrammar", False, [2])


@pytest.mark.ci
def test_a_server_that_chooses_its_library_settles_on_the_one_that_can_be_replayed(plain: Plain) -> None:
    """On its own, vLLM would choose guidance for this schema, and then compile every later grammar with it.

    The server's own request that settles the library is not counted as a client's.
    """
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}, "required": ["n"]}
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    body = {
        "model": "policy",
        "messages": MESSAGES,
        "max_tokens": 12,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    client = PolicyClient(plain.server.url)

    def client_requests() -> int:
        return client.successful_answers() - client.state().internal_requests

    before = client_requests()
    status, answer, _ = plain.server.post("/v1/chat/completions", body, {"traceparent": str(parent)})
    assert status == 200, answer
    (span,) = plain.sink.wait(1, lambda span: span.trace_id == parent.trace_id)
    assert client_requests() == before + 1
    state = client.state()
    assert state.internal_requests > state.internal_calls, "the request that fixes the grammar library is no call"
    grammar = constraint(span).grammar
    assert grammar
    assert (grammar.kind, grammar.library, grammar.any_whitespace) == ("json_schema", "xgrammar", True)
    scorer = Scorer(plain.base)
    try:
        assert agree([span], scorer) < 1e-4
    finally:
        scorer.replayer.close()


@pytest.mark.slow
def test_a_grammar_behind_reasoning_masks_from_where_the_engine_did(tmp_path: Path) -> None:
    """Runs a server with a reasoning parser; a bias makes random weights end their reasoning soon."""
    folder = with_thinking(make_tiny_model(tmp_path / "model", seed=0))
    end = load_tokenizer(folder).convert_tokens_to_ids("</think>")
    scorer = Scorer(folder)
    flags = (*FLAGS, "--reasoning-parser", "deepseek_r1")
    with (
        otlp_sink() as (sink, url),
        policy_server(folder, tmp_path / "home", "--collector", url, flags=flags) as server,
    ):
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": PLACE}}
        body = {"model": "policy", "messages": MESSAGES, "max_tokens": 60, "n": 6, "response_format": schema}
        biased = {**body, "logit_bias": {str(end): 4.5}}
        for asked in (biased, {**biased, "temperature": 0.7}, {**biased, "include_reasoning": False}):
            server.post("/v1/chat/completions", asked)
        spans = sink.wait(18, lambda span: keys.SAMPLING_CONSTRAINT in span.attributes)
    starts = [span.attributes.get(keys.CONSTRAINT_START, 0) for span in spans]
    for span, start in zip(spans, starts, strict=True):
        ids = decode_ids(span.attributes[keys.COMPLETION_TOKEN_IDS])
        assert start in (0, ids.index(end) + 1 if end in ids else len(ids))
    assert starts.count(0) == 6  # without reasoning, the answer is masked from its first token
    assert len(set(starts)) > 3
    assert (
        max(float(np.abs(scorer.logprobs(span, *scorer.replayed(span)) - logged(span)).max()) for span in spans) < 1e-4
    )
    scorer.replayer.close()


@pytest.mark.ci
def test_what_a_grammar_costs_ends_with_its_client(stack: Stack) -> None:
    """In the engine it would take minutes of one core, and every other grammar would wait for it."""
    choices = [f"answer number {number} of many" for number in range(100_000)]
    body = {"model": "policy", "messages": MESSAGES, "structured_outputs": {"choice": choices}}
    content = json.dumps(body).encode()
    address = urlsplit(stack.server.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        time.sleep(2)
    short = {**body, "structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 8}
    status, answer, _ = stack.server.post("/v1/chat/completions", short)
    assert (status, answer["choices"][0]["message"]["content"] in ("left", "right")) == (200, True)
    before = cpu_seconds(stack.server.process.pid)
    time.sleep(2)
    assert cpu_seconds(stack.server.process.pid) - before < 0.5


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of those that it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))

"""Call spans compared with the response to the client and with transformers' own forward pass."""

import http.client
import json
import secrets
import threading
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.serving.support.servers import Models, Stack
from tests.support.models.canary import logprobs_of
from tests.support.otlp.sink import ReceivedSpan
from trainspan_loop.clients.policy_server import PolicyClient
from trainspan_schemas.agents.unnamed_agents import agent_of_body
from trainspan_schemas.artifacts.checkpoint import digest_of_model
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.tokens import decode_ids, decode_logprobs
from trainspan_serving.capture.engine_tap import EngineTap

pytestmark = pytest.mark.usefixtures("base_policy")

MESSAGES = [{"role": "system", "content": "calc"}, {"role": "user", "content": "7*5 of the answer"}]


class Caller:
    """A new trace per test, so that each finds its own spans."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
        self.client = openai.OpenAI(
            base_url=stack.server.url + "/v1",
            api_key="none",
            default_headers={"traceparent": str(self.parent)},
            max_retries=0,
        )

    def spans(self, count: int) -> list[ReceivedSpan]:
        spans = self.stack.sink.wait(count, lambda span: span.trace_id == self.parent.trace_id)
        return sorted(spans, key=lambda span: (span.attributes[keys.CALL_INDEX], span.attributes[keys.CHOICE_INDEX]))


@pytest.fixture
def caller(stack: Stack) -> Caller:
    return Caller(stack)


def check_tokens(span: ReceivedSpan, models: Models, completion_ids: list[int] | None = None) -> None:
    """Checks that the span has the given ids and transformers' log-probabilities."""
    prompt = decode_ids(span.attributes[keys.PROMPT_TOKEN_IDS])
    completion = decode_ids(span.attributes[keys.COMPLETION_TOKEN_IDS])
    if completion_ids is not None:
        assert completion == completion_ids
    expected = logprobs_of(models.base, prompt, completion)
    assert decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS]) == pytest.approx(expected, abs=1e-4)
    assert span.attributes[keys.GEN_AI_INPUT_TOKENS] == len(prompt)
    assert span.attributes[keys.GEN_AI_OUTPUT_TOKENS] == len(completion)


def test_a_chat_call_has_the_ids_and_logprobs_that_the_client_can_ask_for(caller: Caller, models: Models) -> None:
    answer = caller.client.chat.completions.create(
        model="policy",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=40,
        seed=5,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    (span,) = caller.spans(1)
    raw = answer.model_dump()
    check_tokens(span, models, raw["choices"][0]["token_ids"])
    assert decode_ids(span.attributes[keys.PROMPT_TOKEN_IDS]) == raw["prompt_token_ids"]
    served = [token["logprob"] for token in raw["choices"][0]["logprobs"]["content"]]
    assert decode_logprobs(span.attributes[keys.COMPLETION_LOGPROBS]) == pytest.approx(served, abs=1e-6)
    assert (span.name, span.kind, span.parent_span_id) == ("chat policy", 2, caller.parent.span_id)
    assert {key: span.attributes[key] for key in SHARED} == {
        keys.GEN_AI_OPERATION: "chat",
        keys.GEN_AI_RESPONSE_ID: answer.id,
        keys.GEN_AI_FINISH_REASONS: [answer.choices[0].finish_reason],
        keys.GEN_AI_TEMPERATURE: 1.0,
        keys.GEN_AI_TOP_P: 1.0,
        keys.GEN_AI_SEED: 5,
        keys.GEN_AI_MAX_TOKENS: 40,
        keys.LOGPROBS_MODE: "processed",
        keys.SAMPLING_CONSTRAINED: False,
        keys.POLICY_NAME: "policy",
        keys.POLICY_BASE: digest_of_model(models.base),
        keys.POLICY_VERSION: 0,
        keys.CALL_INDEX: 0,
        keys.CALL_DELIVERED: True,
        keys.CALL_ENDPOINT: "/v1/chat/completions",
        keys.CHOICE_INDEX: 0,
    }
    assert keys.CALL_INTERNAL not in span.attributes


SHARED = (
    keys.GEN_AI_OPERATION,
    keys.GEN_AI_RESPONSE_ID,
    keys.GEN_AI_FINISH_REASONS,
    keys.GEN_AI_TEMPERATURE,
    keys.GEN_AI_TOP_P,
    keys.GEN_AI_SEED,
    keys.GEN_AI_MAX_TOKENS,
    keys.LOGPROBS_MODE,
    keys.SAMPLING_CONSTRAINED,
    keys.POLICY_NAME,
    keys.POLICY_BASE,
    keys.POLICY_VERSION,
    keys.CALL_INDEX,
    keys.CALL_DELIVERED,
    keys.CALL_ENDPOINT,
    keys.CHOICE_INDEX,
)


def test_a_client_that_requests_nothing_extra_is_captured_too(caller: Caller, models: Models) -> None:
    answer = caller.client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=30)  # type: ignore[arg-type]
    (span,) = caller.spans(1)
    check_tokens(span, models)
    assert answer.choices[0].logprobs is None
    assert answer.usage
    assert span.attributes[keys.GEN_AI_OUTPUT_TOKENS] == answer.usage.completion_tokens


def test_a_stream_is_captured_as_it_was_sent(caller: Caller, models: Models) -> None:
    stream = caller.client.chat.completions.create(
        model="policy",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=60,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    ids: list[int] = []
    for chunk in stream:
        for choice in chunk.model_dump()["choices"]:
            ids += choice.get("token_ids") or []
    (span,) = caller.spans(1)
    check_tokens(span, models, ids)
    assert span.attributes[keys.CALL_DELIVERED] is True


def test_each_of_two_choices_is_a_span_and_they_share_the_call_index(caller: Caller, models: Models) -> None:
    client = PolicyClient(caller.stack.server.url)
    before = client.successful_answers()
    for _ in range(2):
        answer = caller.client.chat.completions.create(
            model="policy",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=20,
            n=2,
            extra_body={"return_token_ids": True},
        )
    spans = caller.spans(4)
    places = [(span.attributes[keys.CALL_INDEX], span.attributes[keys.CHOICE_INDEX]) for span in spans]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert client.successful_answers() - before == 4, "the loop compares vLLM's count with the stored choices"
    for span, choice in zip(spans[2:], answer.model_dump()["choices"], strict=True):
        check_tokens(span, models, choice["token_ids"])
    assert spans[2].attributes[keys.COMPLETION_TOKEN_IDS] != spans[3].attributes[keys.COMPLETION_TOKEN_IDS]


def test_a_stream_of_two_choices_keeps_them_apart(caller: Caller, models: Models) -> None:
    stream = caller.client.chat.completions.create(
        model="policy",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=20,
        n=2,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in stream:
        for choice in chunk.model_dump()["choices"]:
            ids[choice["index"]] += choice.get("token_ids") or []
    for span, number in zip(caller.spans(2), (0, 1), strict=True):
        check_tokens(span, models, ids[number])


@pytest.mark.parametrize("stream", [False, True])
def test_two_answers_to_each_of_two_prompts_are_four_choices_of_one_call(
    caller: Caller, models: Models, stream: bool
) -> None:
    prompts = [[5, 6, 7, 8, 9], [20, 21, 22]]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 12, "extra_body": {"return_token_ids": True}}
    created = caller.client.completions.create(model="policy", stream=stream, **body)
    answers = [answer.model_dump() for answer in (created if stream else [created])]
    ids: dict[int, list[int]] = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        ids.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
    spans = caller.spans(4)
    assert [span.attributes[keys.CHOICE_INDEX] for span in spans] == [0, 1, 2, 3]
    assert {span.attributes[keys.CALL_INDEX] for span in spans} == {0}
    for number, span in enumerate(spans):
        check_tokens(span, models, ids[number])
        assert decode_ids(span.attributes[keys.PROMPT_TOKEN_IDS]) == prompts[number // 2]
        assert span.attributes[keys.GEN_AI_RESPONSE_ID] == answers[0]["id"]
        assert span.name == "text_completion policy"


def test_the_responses_and_messages_endpoints_are_captured_too(caller: Caller, models: Models) -> None:
    response = caller.client.responses.create(model="policy", input="calc 7", max_output_tokens=16)
    body = {"model": "policy", "max_tokens": 16, "messages": [{"role": "user", "content": "calc 7"}]}
    status, message, _ = caller.stack.server.post("/v1/messages", body, {"traceparent": str(caller.parent)})
    assert status == 200
    first, second = caller.spans(2)
    check_tokens(first, models)
    check_tokens(second, models)
    assert first.attributes[keys.GEN_AI_RESPONSE_ID] == response.id
    assert first.attributes[keys.CALL_ENDPOINT] == "/v1/responses"
    assert second.attributes[keys.GEN_AI_RESPONSE_ID] == message["id"]
    assert second.attributes[keys.CALL_ENDPOINT] == "/v1/messages"


@pytest.mark.ci
def test_offering_tools_leaves_the_distribution_alone_and_forcing_a_format_does_not(
    caller: Caller, models: Models
) -> None:
    tool = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    caller.client.chat.completions.create(
        model="policy",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=24,
        tools=[{"type": "function", "function": tool}],  # type: ignore[list-item]
    )
    caller.client.chat.completions.create(
        model="policy",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=24,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    free, forced = caller.spans(2)
    check_tokens(free, models)
    assert free.attributes[keys.SAMPLING_CONSTRAINED] is False
    assert forced.attributes[keys.SAMPLING_CONSTRAINED] is True


def test_the_sampling_recorded_is_the_sampling_done(caller: Caller) -> None:
    caller.client.chat.completions.create(
        model="policy",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2},
    )
    (span,) = caller.spans(1)
    recorded = [
        span.attributes[key]
        for key in (
            keys.GEN_AI_TEMPERATURE,
            keys.GEN_AI_TOP_P,
            keys.GEN_AI_TOP_K,
            keys.GEN_AI_MIN_P,
            keys.GEN_AI_REPETITION_PENALTY,
        )
    ]
    assert recorded == [0.5, 0.9, 7, 0.1, 1.2]
    assert span.attributes[keys.SAMPLING_CONSTRAINED] is True


def test_an_answer_that_the_client_did_not_wait_for_is_not_delivered(caller: Caller) -> None:
    for stream in (True, False):
        connection = http.client.HTTPConnection(caller.stack.server.url.removeprefix("http://"), timeout=30)
        body = {"model": "policy", "messages": MESSAGES, "max_tokens": 900, "ignore_eos": True, "stream": stream}
        headers = {"Content-Type": "application/json", "traceparent": str(caller.parent)}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        if stream:
            answer = connection.getresponse()
            answer.read(300)
            answer.close()
        else:
            threading.Event().wait(0.3)
        connection.close()
    streamed, whole = caller.spans(2)
    assert [streamed.attributes[keys.CALL_DELIVERED], whole.attributes[keys.CALL_DELIVERED]] == [False, False]
    assert streamed.attributes[keys.GEN_AI_FINISH_REASONS] == whole.attributes[keys.GEN_AI_FINISH_REASONS] == ["abort"]
    assert 0 < streamed.attributes[keys.GEN_AI_OUTPUT_TOKENS] < 900
    assert len(decode_ids(whole.attributes[keys.PROMPT_TOKEN_IDS])) == whole.attributes[keys.GEN_AI_INPUT_TOKENS] > 0
    assert (streamed.status, whole.status) == (2, 2)
    assert caller.stack.server.policy()["in_flight"] == 0


def test_identity_and_agent_come_from_baggage_and_calls_are_counted_per_attempt(stack: Stack) -> None:
    rollout = secrets.token_hex(8)
    first = Identity(rollout, "run-1", "task 7/ä", attempt=0, round=3, split="val")
    second = Identity(rollout, "run-1", "task 7/ä", attempt=1, round=3, split="val")
    for identity in (first, first, second):
        headers = {"baggage": "other=1," + identity.to_baggage("planner")}
        assert _chat(stack, "/v1/chat/completions", headers)[0] == 200
    spans = stack.sink.wait(3, lambda span: span.attributes.get(keys.ROLLOUT_ID) == rollout)
    spans.sort(key=lambda span: span.start_ns)
    assert {key: spans[0].attributes[key] for key in first.attributes()} == first.attributes()
    assert [span.attributes[keys.GEN_AI_AGENT_NAME] for span in spans] == ["planner"] * 3
    numbers = [(span.attributes[keys.ATTEMPT], span.attributes[keys.CALL_INDEX]) for span in spans]
    assert numbers == [(0, 0), (0, 1), (1, 0)]
    assert len({span.trace_id for span in spans}) == 3


def test_an_agent_without_a_name_is_known_by_its_system_prompt_whatever_language_it_is_written_in(stack: Stack) -> None:
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    for system in ("You plan.", "You plan.", "You pack."):
        messages = [{"role": "system", "content": system}, MESSAGES[-1]]
        body = {"model": "policy", "messages": messages, "max_tokens": 4}
        assert stack.server.post(f"/rollout/{parent}/v1/chat/completions", body)[0] == 200
    spans = stack.sink.wait(3, lambda span: span.trace_id == parent.trace_id)
    spans.sort(key=lambda span: span.attributes[keys.CALL_INDEX])
    planner, again, packer = (span.attributes[keys.GEN_AI_AGENT_NAME] for span in spans)
    assert planner == again == agent_of_body(b'{"messages": [{"role": "system", "content": "You plan."}]}')
    assert packer != planner


def test_a_request_for_more_tokens_than_the_context_holds_gets_what_is_left_and_its_span_says_so(stack: Stack) -> None:
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    body = {"model": "policy", "messages": MESSAGES, "stop": [" "], "ignore_eos": False}
    for name in ("max_tokens", "max_completion_tokens"):
        asked = {
            **body,
            name: 10**6,
            "messages": [{"role": "system", "content": "You write the title of a conversation."}],
        }
        assert stack.server.post(f"/rollout/{parent}/v1/chat/completions", asked)[0] == 200
    for span in stack.sink.wait(2, lambda span: span.trace_id == parent.trace_id):
        said = span.attributes
        assert said[keys.ASKED_MAX_TOKENS] == 10**6
        assert said[keys.GEN_AI_MAX_TOKENS] + said[keys.GEN_AI_INPUT_TOKENS] == 1024
        assert (said[keys.CALL_KIND], said[keys.CALL_KIND_RULE]) == ("title", "system_prompt")


def test_a_traceparent_in_the_url_or_the_api_key_is_enough(stack: Stack) -> None:
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    key = {"Authorization": f"Bearer trainspan-{parent}"}
    assert _chat(stack, f"/rollout/{parent}/v1/chat/completions", {})[0] == 200
    assert _chat(stack, "/v1/chat/completions", key)[0] == 200
    assert _chat(stack, f"/rollout/{parent}/v1/chat/completions", {"traceparent": str(parent)})[0] == 200
    spans = stack.sink.wait(3, lambda span: span.trace_id == parent.trace_id)
    assert [span.attributes[keys.CALL_ENDPOINT] for span in spans] == ["/v1/chat/completions"] * 3
    assert {span.parent_span_id for span in spans} == {parent.span_id}
    assert sorted(span.attributes[keys.CALL_INDEX] for span in spans) == [0, 1, 2]


def test_an_agent_that_traces_itself_is_captured_in_the_rollout_that_its_url_names(stack: Stack) -> None:
    rollout, own, other = (TraceParent(secrets.token_hex(16), secrets.token_hex(8)) for _ in range(3))
    assert _chat(stack, f"/rollout/{rollout}/v1/chat/completions", {"traceparent": str(own)})[0] == 200
    (span,) = stack.sink.wait(1, lambda span: span.trace_id == rollout.trace_id)
    assert (span.parent_span_id, span.links) == (rollout.span_id, [(own.trace_id, own.span_id)])
    key = {"Authorization": f"Bearer trainspan-{other}"}
    status, answer = _chat(stack, f"/rollout/{rollout}/v1/chat/completions", key)
    assert (status, "names two rollouts" in answer["error"]["message"]) == (400, True)
    status, answer = _chat(stack, "/rollout/nonsense/v1/chat/completions", {})
    assert status == 400
    assert "'nonsense' is not a traceparent" in answer["error"]["message"]
    assert not stack.sink.spans(lambda span: span.trace_id in (own.trace_id, other.trace_id))


def test_an_unsampled_caller_is_captured_and_a_refused_request_is_not_a_call(stack: Stack) -> None:
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8), sampled=False)
    status, _, headers = stack.server.post("/v1/chat/completions", {"model": "policy"}, {"traceparent": str(parent)})
    assert status == 400
    assert headers[keys.HEADER_POLICY_VERSION] == "0"
    assert _chat(stack, "/v1/chat/completions", {"traceparent": str(parent)})[0] == 200
    (span,) = stack.sink.wait(1, lambda span: span.trace_id == parent.trace_id)
    assert span.attributes[keys.CALL_INDEX] == 0


def test_named_tokens_and_mere_echoes_are_answered_and_recorded(stack: Stack, models: Models) -> None:
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8))
    body = {"model": "policy", "prompt": [11, 12, 13]}
    bodies = (
        {**body, "max_tokens": 3, "logprobs": 1, "logprob_token_ids": [10**9]},
        {**body, "max_tokens": 3, "logprobs": 1, "logprob_token_ids": [20, 21]},
        {**body, "max_tokens": 0, "echo": True},
    )
    answers = [stack.server.post("/v1/completions", one, {"traceparent": str(parent)})[0] for one in bodies]
    assert answers == [400, 200, 200]
    named, echo = stack.sink.wait(2, lambda span: span.trace_id == parent.trace_id)
    check_tokens(named, models)
    assert [one.attributes[keys.CALL_INDEX] for one in (named, echo)] == [0, 1]
    assert [one.attributes[keys.CALL_DELIVERED] for one in (named, echo)] == [True, False]


def _chat(stack: Stack, path: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    status, answer, _ = stack.server.post(path, {"model": "policy", "messages": MESSAGES, "max_tokens": 4}, headers)
    return status, answer


def test_the_servers_own_requests_include_the_one_that_fixes_the_grammar_library() -> None:
    tap: Any = SimpleNamespace(internal_calls=3, _constraints=SimpleNamespace(requests=1))
    assert EngineTap.internal_requests.fget(tap) == 4  # type: ignore[attr-defined]

"""All request forms of the official SDKs: finished calls are captured whole, abandoned ones are marked."""

import asyncio
import contextlib
import json
import secrets
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai
import pydantic
import pytest

from tests.serving.capture.test_capture import Caller, check_tokens
from tests.serving.support.servers import Models, Stack
from tests.support.otlp.sink import ReceivedSpan
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_schemas.telemetry.tokens import decode_ids

pytestmark = pytest.mark.usefixtures("base_policy")

MESSAGES: Any = [{"role": "user", "content": "7*5 of the answer"}]
ASKED: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "max_tokens": 40}


class Verdict(pydantic.BaseModel):
    """Bounded, so that a model with random weights terminates."""

    good: bool
    grade: int = pydantic.Field(ge=0, le=3)


def tool(name: str) -> Any:
    parameters = {
        "type": "object",
        "properties": {"side": {"enum": ["left", "right"]}},
        "required": ["side"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


@pytest.fixture
def caller(stack: Stack) -> Caller:
    return Caller(stack)


def only(spans: list[ReceivedSpan]) -> ReceivedSpan:
    (span,) = spans
    return span


def whole(span: ReceivedSpan, reasons: tuple[str, ...] = ("stop", "length")) -> bool:
    """Checks that the call is complete: a log-probability per id, a finish reason, delivered, no error."""
    tokens = decode_ids(span.attributes[keys.COMPLETION_TOKEN_IDS])
    assert len(span.attributes[keys.COMPLETION_LOGPROBS]) == 4 * len(tokens) > 0
    assert span.attributes[keys.GEN_AI_FINISH_REASONS][0] in reasons
    return bool(span.attributes[keys.CALL_DELIVERED]) and span.status == 0


def test_a_parsed_answer_is_captured_and_marked_constrained(caller: Caller) -> None:
    answer = caller.client.chat.completions.parse(**ASKED, response_format=Verdict)
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    response = caller.client.responses.parse(
        model="policy", input="7", text_format=Verdict, max_output_tokens=40, temperature=1.0
    )
    assert isinstance(response.output_parsed, Verdict)
    for span, id_ in zip(caller.spans(2), (answer.id, response.id), strict=True):
        assert whole(span)
        assert (span.attributes[keys.SAMPLING_CONSTRAINED], span.attributes[keys.GEN_AI_RESPONSE_ID]) == (True, id_)


def test_streaming_helpers_of_every_endpoint_are_captured_as_sent(caller: Caller, models: Models) -> None:
    # Greedy: a sampled answer of random weights may end at once.
    with caller.client.chat.completions.stream(**ASKED, temperature=0) as chat:
        text = "".join(event.delta for event in chat if event.type == "content.delta")
    with caller.client.responses.stream(model="policy", input="7", max_output_tokens=20) as responses:
        for _ in responses:
            pass
        response = responses.get_final_response()
    completion = list(
        caller.client.completions.create(model="policy", prompt="calc", max_tokens=20, stream=True, stop=["zzz"])
    )
    with _anthropic(caller).messages.stream(model="policy", max_tokens=20, messages=MESSAGES) as messages:
        message = messages.get_final_message()
    spans = caller.spans(4)
    for span in spans:
        assert whole(span)
        check_tokens(span, models)
    ids = [span.attributes[keys.GEN_AI_RESPONSE_ID] for span in spans]
    assert ids == [ids[0], response.id, completion[0].id, message.id]
    assert text
    assert [span.attributes[keys.CALL_ENDPOINT] for span in spans] == [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/completions",
        "/v1/messages",
    ]


def test_raw_and_streamed_responses_carry_the_version_and_are_captured(caller: Caller, models: Models) -> None:
    raw = caller.client.chat.completions.with_raw_response.create(**ASKED)
    with caller.client.chat.completions.with_streaming_response.create(**ASKED) as streamed:
        body = json.loads("".join(streamed.iter_text()))
        assert streamed.headers[keys.HEADER_POLICY_VERSION] == "0"
    assert raw.headers[keys.HEADER_POLICY_VERSION] == "0"
    for span, id_ in zip(caller.spans(2), (raw.parse().id, body["id"]), strict=True):
        assert whole(span)
        check_tokens(span, models)
        assert span.attributes[keys.GEN_AI_RESPONSE_ID] == id_


def test_no_client_chooses_the_id_of_a_response_and_each_response_names_its_call(caller: Caller) -> None:
    chosen, more = {"X-Request-Id": "chosen"}, {"request_id": "resp_chosen"}
    answers: list[Any] = [
        caller.client.chat.completions.with_raw_response.create(**ASKED, extra_headers=chosen, extra_body=more)
        for _ in range(2)
    ]
    prompts: Any = ["calc", "7*5"]
    answers += [
        caller.client.completions.with_raw_response.create(
            model="policy", prompt=prompts, max_tokens=4, extra_headers=chosen, extra_body=more
        ),
        caller.client.responses.with_raw_response.create(
            model="policy", input="7", max_output_tokens=20, extra_headers=chosen, extra_body=more
        ),
    ]
    spans = caller.spans(5)
    ids = [span.attributes[keys.GEN_AI_RESPONSE_ID] for span in spans]
    assert [answer.parse().id for answer in answers] == [ids[0], ids[1], ids[2], ids[4]]
    assert ids[2] == ids[3]
    assert len(set(ids)) == 4
    assert "chosen" not in "".join(ids)
    named = [answer.headers[keys.HEADER_CALL] for answer in answers]
    assert named == [span.span_id for span in spans if span.attributes[keys.CHOICE_INDEX] == 0]


def test_tools_are_recorded_as_the_template_gets_them_and_a_template_that_leaves_them_out_is_named_once(
    caller: Caller,
) -> None:
    function = tool("turn")["function"] | {"strict": True}
    chat: Any = [{"type": "function", "function": function}]
    caller.client.chat.completions.create(**ASKED, tools=chat)
    caller.client.responses.create(
        model="policy", input="7", max_output_tokens=16, tools=[{"type": "function", **function}]
    )
    caller.client.chat.completions.create(**ASKED)
    *offered, without = [span.attributes.get(keys.GEN_AI_TOOL_DEFINITIONS) for span in caller.spans(3)]
    assert [json.loads(tools) for tools in offered if tools] == [chat, chat]
    assert without is None
    said = "the request offers 1 tool, the prompt has none: serve a model whose chat template has tools"
    assert caller.stack.server.log.read_text().count("the prompt has none") == 1
    assert said in caller.stack.server.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls_one_or_several_are_one_generation(caller: Caller, stream: bool) -> None:
    for parallel in (False, True):
        answer: Any = caller.client.chat.completions.create(
            **{**ASKED, "max_tokens": 200},
            tools=[tool("turn"), tool("look")],
            tool_choice="required",
            parallel_tool_calls=parallel,
            stream=stream,
            seed=11,
        )
        if stream:
            calls = {
                call.index: call.function.name
                for chunk in answer
                for choice in chunk.choices
                for call in choice.delta.tool_calls or ()
                if call.function.name
            }
            names = list(calls.values())
        else:
            names = [call.function.name for call in answer.choices[0].message.tool_calls]
        assert names
        assert set(names) <= {"turn", "look"}
        assert parallel or len(names) == 1
    for span in caller.spans(2):
        assert whole(span, ("stop", "length", "tool_calls"))
        assert span.attributes[keys.SAMPLING_CONSTRAINED] is True


def test_the_messages_endpoint_with_tools_is_captured(caller: Caller, models: Models) -> None:
    offered: Any = [{"name": "turn", "input_schema": tool("turn")["function"]["parameters"]}]
    message = _anthropic(caller).messages.create(model="policy", max_tokens=30, messages=MESSAGES, tools=offered)
    span = only(caller.spans(1))
    assert whole(span)
    check_tokens(span, models)
    assert span.attributes[keys.GEN_AI_RESPONSE_ID] == message.id


def test_a_client_that_stops_reading_at_the_finish_reason_has_had_the_whole_answer(caller: Caller) -> None:
    with caller.client.chat.completions.create(**ASKED, stream=True) as stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].finish_reason:
                break
    assert whole(only(caller.spans(1)))


def test_a_call_whose_client_times_out_is_not_delivered(caller: Caller) -> None:
    def chat(client: openai.OpenAI) -> None:
        client.chat.completions.create(**{**ASKED, "max_tokens": 900, "extra_body": {"ignore_eos": True}})

    def responses(client: openai.OpenAI) -> None:
        client.responses.create(model="policy", input="7", max_output_tokens=900, extra_body={"ignore_eos": True})

    _given_up(caller, chat, 1)
    for span in _given_up(caller, responses, 2):
        assert (span.attributes[keys.CALL_DELIVERED], span.attributes[keys.GEN_AI_FINISH_REASONS]) == (False, ["abort"])
        assert span.status == 2


def _given_up(caller: Caller, ask: Callable[[openai.OpenAI], None], n_spans: int) -> list[ReceivedSpan]:
    """The spans after a call that was given up; a client that is gone before the server has read its request tries again."""
    for timeout in (0.3, 0.6, 1.2):
        with pytest.raises(openai.APITimeoutError):
            ask(caller.client.with_options(timeout=timeout))
        with contextlib.suppress(TimeoutError):
            return caller.spans(n_spans)
    pytest.fail("the server began none of three calls")


def test_a_clients_own_retry_is_a_call_of_its_own_after_the_one_that_was_given_up(
    caller: Caller, models: Models
) -> None:
    attempts: list[str] = []

    def hurry_once(request: httpx2.Request) -> None:
        attempts.append(request.headers["x-stainless-retry-count"])
        if len(attempts) == 1:
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), 0.3)

    with httpx2.Client(event_hooks={"request": [hurry_once]}) as client:
        answer = caller.client.with_options(max_retries=1, http_client=client).chat.completions.create(
            **{**ASKED, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        )
    assert attempts == ["0", "1"]
    given_up, answered = caller.spans(2)
    assert (given_up.attributes[keys.CALL_DELIVERED], given_up.status) == (False, 2)
    assert answered.attributes[keys.GEN_AI_RESPONSE_ID] == answer.id
    assert whole(answered)
    check_tokens(answered, models)


def test_a_cancelled_task_is_not_delivered_and_its_neighbor_is(caller: Caller, models: Models) -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(
            base_url=caller.stack.server.url + "/v1",
            api_key="none",
            default_headers={"traceparent": str(caller.parent)},
            max_retries=0,
        ) as client:
            ignoring: Any = {**ASKED, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
            doomed = asyncio.create_task(client.chat.completions.create(**ignoring))
            neighbor = asyncio.create_task(client.chat.completions.create(**ASKED))
            answer = await neighbor
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            return answer.id

    id_ = asyncio.run(main())
    spans = {span.attributes[keys.GEN_AI_RESPONSE_ID] == id_: span for span in caller.spans(2)}
    assert whole(spans[True])
    check_tokens(spans[True], models)
    assert (spans[False].attributes[keys.CALL_DELIVERED], spans[False].status) == (False, 2)


def test_refused_requests_are_not_calls(caller: Caller) -> None:
    client = caller.client
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**{**ASKED, "messages": [{"role": "user", "content": "calc " * 2000}]})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**ASKED, "model": "other"})
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASKED, temperature=-1)
    answer = client.chat.completions.create(**ASKED)
    span = only(caller.spans(1))
    assert (span.attributes[keys.GEN_AI_RESPONSE_ID], span.attributes[keys.CALL_INDEX]) == (answer.id, 0)


def test_a_response_in_the_background_which_would_end_after_its_request_is_refused_by_name(caller: Caller) -> None:
    with pytest.raises(openai.BadRequestError, match="a response in the background could not be recorded"):
        caller.client.responses.create(model="policy", input="7", background=True)
    caller.client.responses.create(model="policy", input="7", max_output_tokens=4, background=False)
    assert len(caller.spans(1)) == 1


def test_many_clients_at_once_each_get_their_own(stack: Stack, models: Models) -> None:
    parents = [TraceParent(secrets.token_hex(16), secrets.token_hex(8)) for _ in range(24)]

    async def main() -> list[ReceivedSpan]:
        async with openai.AsyncOpenAI(base_url=stack.server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="policy",
                        messages=[{"role": "user", "content": f"calc {number}"}],
                        max_tokens=12,
                        n=1 + number % 2,
                        extra_headers={"traceparent": str(parent)},
                        extra_body={"return_token_ids": True},
                    )
                    for number, parent in enumerate(parents)
                )
            )

    for parent, answer in zip(parents, asyncio.run(main()), strict=True):
        spans = stack.sink.wait(len(answer.choices), lambda span, id_=parent.trace_id: span.trace_id == id_)
        spans.sort(key=lambda span: span.attributes[keys.CHOICE_INDEX])
        raw = answer.model_dump()
        for span, choice in zip(spans, raw["choices"], strict=True):
            check_tokens(span, models, choice["token_ids"])
            assert decode_ids(span.attributes[keys.PROMPT_TOKEN_IDS]) == raw["prompt_token_ids"]


def _anthropic(caller: Caller) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=caller.stack.server.url, api_key="none", default_headers={"traceparent": str(caller.parent)}
    )


def test_all_our_counters_are_exported_with_vllms(stack: Stack) -> None:
    deadline = time.monotonic() + 5
    while True:
        state = stack.server.policy()
        if state["calls_exported"] == state["calls_captured"] - state["calls_dropped"]:
            break
        assert time.monotonic() < deadline
    with urllib.request.urlopen(stack.server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith("trainspan_")}
    assert values["trainspan_calls_captured_total"] == state["calls_captured"] > 0
    assert values["trainspan_calls_exported_total"] == state["calls_exported"]
    assert values["trainspan_calls_dropped_total"] == state["calls_dropped"]
    assert (values["trainspan_policy_version"], values["trainspan_policy_open"]) == (0, 1)
    assert any(line.startswith("vllm:request_success_total") for line in lines)

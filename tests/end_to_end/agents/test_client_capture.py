"""`TRAINSPAN_CAPTURE=client`: token-exact calls from a policy server that is not ours, and nothing that the client notices."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.agents.bare_server import BareServer, bare_server
from tests.end_to_end.agents.conftest import Stack
from tests.support.collector.process import read
from trainspan_cli.doctor.capture_checks import capture_findings

pytestmark = pytest.mark.ci

ASK = """
import asyncio, json, sys
import httpx, httpx2, os
from openai import AsyncOpenAI, OpenAI

MESSAGES = [{"role": "user", "content": "Find a heavy box."}]
CHAT = {"model": "policy", "messages": MESSAGES, "max_tokens": 12, "seed": 5}
TEXT = {"model": "policy", "prompt": "Find", "max_tokens": 8, "seed": 5}
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
HEADERS = {"authorization": f"Bearer {KEY}"}
seen = []


def plain(value):
    \"\"\"Without what differs from call to call.\"\"\"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in ("id", "created")}
    return [plain(item) for item in value] if isinstance(value, list) else value


def joined(chunks):
    \"\"\"The text of a stream, and the other chunks: a busy server puts several tokens into a chunk, or all into the last.\"\"\"
    text, others = "", []
    for chunk in map(plain, chunks):
        choice = chunk["choices"][0]
        if "role" not in choice["delta"]:
            text += choice["delta"].pop("content")
        if "role" not in choice["delta"] and choice["finish_reason"] is None:
            assert not choice["delta"] and choice.get("logprobs") is choice.get("token_ids") is None
        else:
            others.append(chunk)
    return [text, others]


def events(text):
    lines = text.split("\\n")
    assert lines[1::2] == [""] * (len(lines) // 2) and lines[-3:] == ["data: [DONE]", "", ""]
    return joined(json.loads(line.removeprefix("data: ")) for line in lines[:-3:2])


def synchronous(library):
    with library.Client(headers=HEADERS, timeout=60) as client:
        seen.append(plain(client.post(f"{URL}/chat/completions", json=CHAT).json()))
        seen.append(plain(client.post(f"{URL}/chat/completions", json={**CHAT, "n": 2, "logprobs": True}).json()))
        seen.append(plain(client.post(f"{URL}/completions", json=TEXT).json()))
        seen.append(events(client.post(f"{URL}/chat/completions", json={**CHAT, "stream": True}).text))
        with client.stream("POST", f"{URL}/chat/completions", json={**CHAT, "return_token_ids": True}) as answer:
            seen.append(plain(json.loads(answer.read())))


async def asynchronous(library):
    async with library.AsyncClient(headers=HEADERS, timeout=60) as client:
        async with client.stream("POST", f"{URL}/chat/completions", json={**CHAT, "stream": True}) as answer:
            seen.append(events("".join([part async for part in answer.aiter_text()])))
    async with AsyncOpenAI() as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        seen.append(joined([chunk.model_dump(exclude_unset=True) async for chunk in stream]))


for library in (httpx, httpx2):
    synchronous(library)
    asyncio.run(asynchronous(library))
seen.append(plain(OpenAI().chat.completions.create(**CHAT).model_dump()))
seen.append(OpenAI().chat.completions.with_raw_response.create(**CHAT).http_response.status_code)
print(json.dumps(seen))
"""
CALLS = 2 * (1 + 2 + 1 + 1 + 1 + 1 + 1) + 2


@pytest.fixture
def server(stack: Stack) -> Iterator[BareServer]:
    with bare_server(stack.server.url) as server:
        yield server


def run(
    stack: Stack, server: BareServer, tmp_path: Path, name: str, program: str, **extra: str
) -> tuple[Any, list[dict[str, Any]]]:
    """The program's output, and the model calls that its process stored, by span."""
    path = tmp_path / "agent.py"
    path.write_text(textwrap.dedent(program))
    ran = stack.run(str(path), name=name, extra={"OPENAI_BASE_URL": f"{server.url}/v1", **extra})
    assert (ran.code, ran.stderr) == (0, "")
    (rollout_id,) = stack.rollouts_of(name)
    spans = read(stack.collector.address, "spans", rollout_ids=[rollout_id])
    return json.loads(ran.stdout), [span for span in spans if "trainspan.call.recorded_by" in span["attributes"]]


def test_calls_to_a_foreign_server_are_captured_exactly_and_the_client_gets_what_it_would_have_got(
    stack: Stack, server: BareServer, tmp_path: Path
) -> None:
    without, none = run(stack, server, tmp_path, "client-off", ASK)
    assert none == []
    with_us, spans = run(stack, server, tmp_path, "client-on", ASK, TRAINSPAN_CAPTURE="client")
    for ours, theirs in zip(with_us, without, strict=True):
        assert ours == theirs
    engine = stack.engine_calls("client-on")
    (rollout_id,) = stack.rollouts_of("client-on")
    calls = stack.calls(str(rollout_id), CALLS)
    assert len(calls) == len(engine) == len(spans) == CALLS

    def content(call: dict[str, Any]) -> tuple[Any, ...]:
        logprobs = np.array(call["logprobs"], np.float32).tobytes()
        return tuple(call["prompt_ids"]), tuple(call["completion_ids"]), logprobs, call["finish_reason"]

    assert sorted(content(call) for call in calls) == sorted(content(record) for record in engine)
    assert {call["delivered"] for call in calls} == {True}
    assert {call["policy_name"] for call in calls} == {"policy"}


def test_a_server_that_refuses_the_question_is_asked_without_it_and_the_calls_say_what_they_lack(
    stack: Stack, server: BareServer, tmp_path: Path
) -> None:
    server.refuse = True
    program = """
    import json
    from openai import OpenAI
    client = OpenAI(max_retries=0)
    messages = [{"role": "user", "content": "x"}]
    print(json.dumps([client.chat.completions.create(model="policy", messages=messages, max_tokens=4).id for _ in range(2)]))
    """
    ids, spans = run(stack, server, tmp_path, "client-refused", program, TRAINSPAN_CAPTURE="client")
    assert ["return_token_ids" in body for body in server.bodies] == [True, False, False]
    attributes = [json.loads(span["attributes"]) for span in spans]
    assert [one["gen_ai.response.id"] for one in attributes] == ids
    assert [one["trainspan.call.lacks"] for one in attributes] == [["token_ids", "logprobs"]] * 2
    (rollout_id,) = stack.rollouts_of("client-refused")
    assert stack.calls(str(rollout_id), 0) == []
    (finding,) = [one for one in capture_findings(str(stack.collector.store)) if one.subject == "token ids"]
    count, _, what = finding.detail.partition(" ")
    assert int(count) >= 2
    assert what.startswith("calls came from a server that returns no token ids")
    assert "trainspan serve" in finding.advice


STREAMS = """
import asyncio, contextlib, httpx, httpx2, json, os
from openai import AsyncOpenAI, LengthFinishReasonError, OpenAI

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Find a heavy box."}], "max_tokens": 6, "stream": True}
TEXT = {"model": "policy", "prompt": "Find", "max_tokens": 6, "stream": True}
URL = os.environ["OPENAI_BASE_URL"]
HEADERS = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
client = OpenAI()
kept = []


def until_finished(chunks):
    for chunk in chunks:
        if chunk.choices[0].finish_reason:
            return


async def until_finished_async(chunks):
    async for chunk in chunks:
        if chunk.choices[0].finish_reason:
            return


def until_done(lines):
    for line in lines:
        if line == "data: [DONE]":
            return


def sent(library):
    connection = library.Client(headers=HEADERS, timeout=60)
    kept.append(connection)
    return connection, connection.build_request("POST", URL + "/chat/completions", json=CHAT)


def closed(library, read):
    connection, request = sent(library)
    with connection.stream("POST", URL + "/chat/completions", json=CHAT) as answer:
        read(answer)


def left_open(library, read):
    connection, request = sent(library)
    answer = connection.send(request, stream=True)
    kept.append(answer)
    read(answer)


async def asynchronous():
    async with AsyncOpenAI() as openai:
        async for _ in await openai.chat.completions.create(**CHAT):
            pass
        left = await openai.chat.completions.create(**CHAT)
        await until_finished_async(left)
        await left.close()  # httpx's pool would wait for it
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as connection:
        async with connection.stream("POST", URL + "/chat/completions", json=CHAT) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    break
    await asyncio.sleep(0.5)  # asyncio closes the generators that were left, and says so if the loop ends meanwhile


def helper():
    with client.chat.completions.stream(**{name: value for name, value in CHAT.items() if name != "stream"}) as stream:
        with contextlib.suppress(LengthFinishReasonError):  # after the last choice
            stream.get_final_completion()


def lines_of_openai():
    with client.chat.completions.with_streaming_response.create(**CHAT) as answer:
        until_done(answer.iter_lines())


def with_block():
    with client.chat.completions.create(**CHAT) as stream:
        list(stream)


list(client.chat.completions.create(**CHAT))
with_block()
until_finished(client.chat.completions.create(**CHAT))
stream = client.chat.completions.create(**CHAT)
until_finished(stream)
list(client.completions.create(**TEXT))
list(client.completions.create(**{**TEXT, "prompt": ["Find", "Send"]}))
list(client.chat.completions.create(**CHAT, stream_options={"include_usage": True}))
helper()
lines_of_openai()
closed(httpx, lambda answer: until_done(answer.iter_lines()))
closed(httpx, lambda answer: list(answer.iter_text()))
closed(httpx2, lambda answer: until_done(answer.iter_lines()))
left_open(httpx, lambda answer: until_done(answer.iter_lines()))
asyncio.run(asynchronous())
EARLY = {**CHAT, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
early = client.chat.completions.create(**EARLY)
next(early)
print(json.dumps(0))
"""


def test_streams_are_captured_however_the_client_reads_them(stack: Stack, server: BareServer, tmp_path: Path) -> None:
    _, spans = run(stack, server, tmp_path, "client-streams", STREAMS, TRAINSPAN_CAPTURE="client")
    (rollout_id,) = stack.rollouts_of("client-streams")
    calls = stack.calls(str(rollout_id), 17)
    delivered = sorted(len(call["completion_ids"]) for call in calls if call["delivered"])
    whole = sorted(
        len(record["completion_ids"])
        for record in stack.engine_calls("client-streams")
        if record["finish_reason"] in ("stop", "length")
    )
    assert (len(delivered), len(calls)) == (17, 17), "16 requests, one of them with two prompts"
    assert len(spans) == 18, "the stream that was left before its first token too"
    assert delivered == [n for n in whole if n <= 6]
    assert stack.rollout(str(rollout_id), 17)["n_calls"] == 17, "requests that were answered"


def test_a_stream_that_the_client_leaves_early_is_an_undelivered_call(
    stack: Stack, server: BareServer, tmp_path: Path
) -> None:
    program = """
    from openai import OpenAI
    with OpenAI().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "x"}], max_tokens=200, stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        print(len([next(stream) for _ in range(3)]))
    """
    taken, (span,) = run(stack, server, tmp_path, "client-early", program, TRAINSPAN_CAPTURE="client")
    assert taken == 3
    assert json.loads(span["attributes"])["trainspan.call.delivered"] is False

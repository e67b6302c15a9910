"""The boundary between rollouts: requests of web agents, concurrent blocks, and untrusted callers."""

import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, run, write
from tests.support.agents.web_agent import WebAgent, web_agent
from tests.support.otlp.recorder import OtlpRecorder, RecordedSpan
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity

pytestmark = pytest.mark.ci

APP = """
import asyncio, concurrent.futures, random
import trainspan
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import StreamingResponse
from openai import AsyncOpenAI, OpenAI

app = FastAPI()
pool = concurrent.futures.ThreadPoolExecutor(4)
client, async_client = OpenAI(), AsyncOpenAI()
kept = set()

def ask(text):
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

async def ask_async(text, delay=0.0):
    await asyncio.sleep(delay)
    await async_client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

@app.get("/everywhere/{text}")
async def everywhere(text: str, background: BackgroundTasks):
    await asyncio.gather(*(ask_async(text) for _ in range(2)))
    await asyncio.get_running_loop().run_in_executor(pool, ask, text)
    list(pool.map(ask, [text]))
    background.add_task(ask, text)
    kept.add(asyncio.create_task(ask_async(text, 0.2)))
    return {}

@app.get("/blocks/{text}")
async def blocks(text: str, background: BackgroundTasks):
    await ask_async("outside")
    background.add_task(ask, "outside")

    async def block(part):
        async with trainspan.rollout(task_id=part):
            await ask_async(part)
            await asyncio.get_running_loop().run_in_executor(pool, ask, part)
            kept.add(asyncio.create_task(ask_async(part, 0.1)))

    await asyncio.gather(block(f"{text} a"), block(f"{text} b"))
    return {}

@app.get("/simple/{text}")
def simple(text: str):
    random.seed(42)
    ask(text)
    return {}

@app.get("/fail/{text}")
def fail(text: str):
    ask(text)
    raise KeyError(text)

@app.get("/stream/{text}")
async def stream(text: str):
    async def answer():
        async with trainspan.rollout(task_id=text) as r:
            for step in range(4):
                await asyncio.gather(ask_async(text), asyncio.to_thread(ask, text))
                yield f"{step};" + "x" * 100_000
                r.reward(1.0)

    return StreamingResponse(answer())

@app.get("/stream-sync/{text}")
def stream_sync(text: str):
    def answer():
        with trainspan.rollout(task_id=text) as r:
            for step in range(2):
                list(pool.map(ask, [text]))
                ask(text)
                yield f"{step};"
                r.reward(1.0)

    return StreamingResponse(answer())

@app.get("/idle")
def idle():
    return {}
"""
BARE = """
from openai import AsyncOpenAI

client = AsyncOpenAI()

async def app(scope, receive, send):
    if scope["type"] == "http":
        if scope["path"] != "/idle":
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
"""
"""An ASGI application that, unlike FastAPI, creates no spans itself."""
UVICORN = ["uvicorn", "app:app", "--port", "{port}", "--log-level", "critical"]
GUNICORN = ["gunicorn", "-k", "uvicorn.workers.UvicornWorker", "-w", "2", "-b", "127.0.0.1:{port}", "app:app"]
CALLS = 6
"""of `/everywhere`"""


@contextmanager
def serving(folder: Path, wired: dict[str, str], command: list[str] = UVICORN, **extra: str) -> Iterator[WebAgent]:
    write(folder, APP, "app.py")
    with web_agent(folder, command, {**wired, **extra}) as agent:
        yield agent


def wait_for(policy: OpenAIServer, count: int) -> None:
    deadline_s = time.monotonic() + 20
    while len(policy.requests) < count and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert len(policy.requests) == count


def rollouts_by_text(policy: OpenAIServer) -> dict[str, list[str | None]]:
    """Prompt → rollout ids of its requests."""
    found: dict[str, list[str | None]] = {}
    for request in policy.requests:
        text = request.body["messages"][0]["content"]
        found.setdefault(text, []).append(request.baggage.get(keys.ROLLOUT_ID))
    return found


def requests_of(recorder: OtlpRecorder) -> dict[str, RecordedSpan]:
    """Rollout id → span of the request that is this rollout."""
    return {
        span.attributes[keys.ROLLOUT_ID]: span
        for span in recorder.spans
        if span.attributes.get(keys.ROLLOUT_BOUNDARY) == "request"
    }


@pytest.mark.parametrize(
    ("command", "boundary"),
    [
        pytest.param(UVICORN, "", id="uvicorn"),
        pytest.param(UVICORN, "request", id="uvicorn, boundary request"),
        pytest.param(GUNICORN, "", id="gunicorn prefork"),
    ],
)
def test_each_request_of_a_web_agent_is_a_rollout_with_its_pools_and_background_tasks(
    tmp_path: Path,
    policy: OpenAIServer,
    recorder: OtlpRecorder,
    wired: dict[str, str],
    command: list[str],
    boundary: str,
) -> None:
    texts = [f"question {number}" for number in range(5)]
    with serving(tmp_path, wired, command, TRAINSPAN_BOUNDARY=boundary) as agent:
        paths = [f"/everywhere/{text.replace(' ', '%20')}" for text in texts]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(agent.get, [*paths, "/fail/broken", "/idle"])) == [200] * 5 + [500, 200]
        wait_for(policy, 5 * CALLS + 1)
        recorder.wait_for(lambda seen: len(seen.named("openai.chat")) == 5 * CALLS + 1)
    asked = rollouts_by_text(policy)
    assert {text: len(ids) for text, ids in asked.items()} == {**dict.fromkeys(texts, CALLS), "broken": 1}
    ids = {text: set(found) for text, found in asked.items()}
    assert all(len(one) == 1 for one in ids.values()), ids
    assert len(set().union(*ids.values())) == 6
    requests = requests_of(recorder)
    assert set(requests) == set().union(*ids.values())
    (broken,) = ids["broken"]
    statuses = {rollout_id: span.attributes[keys.ROLLOUT_STATUS] for rollout_id, span in requests.items()}
    assert statuses == {**dict.fromkeys(requests, "ok"), broken: "agent_error"}
    assert all(keys.NO_BOUNDARY not in request.baggage for request in policy.requests)
    chats = [span for span in recorder.named("openai.chat") if span.attributes[keys.ROLLOUT_ID] in requests]
    assert len(chats) == 5 * CALLS + 1


def test_a_public_caller_cannot_say_whose_rollout_its_request_is(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    forged = {
        "baggage": Identity("forged", run_id="run", split="val").to_baggage("somebody") + ",mine=1",
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    }
    with serving(tmp_path, wired) as agent:
        assert agent.get("/simple/forged", forged) == 200
    (request,) = policy.requests
    identity = Identity.from_attributes(request.baggage)
    assert identity is not None
    assert identity == Identity(identity.rollout_id)
    assert set(requests_of(recorder)) == {identity.rollout_id} != {"forged"}
    assert request.baggage.get(keys.GEN_AI_AGENT_NAME) is None
    assert not [span for span in recorder.spans if span.attributes.get(keys.RUN_ID)]


@pytest.mark.slow  # failed in two of three runs of many files, never alone: the cause is not known
def test_a_trusted_caller_chooses_the_rollout_of_its_request(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    identity = Identity("r1", run_id="run", task_id="t1", attempt=1, round=2, split="val")
    with serving(tmp_path, wired, TRAINSPAN_TRUST_BAGGAGE="1") as agent:
        assert agent.get("/simple/x", {"baggage": identity.to_baggage()}) == 200
    (request,) = policy.requests
    spans = [(span.name, span.parent_span_id, span.attributes) for span in recorder.spans]
    assert Identity.from_attributes(request.baggage) == identity, (request.headers, spans)
    assert not requests_of(recorder)
    (served,) = [span for span in recorder.spans if span.name == "GET /simple/{text}"]
    assert served.attributes[keys.ROLLOUT_CALLS] == 1
    assert keys.ROLLOUT_STATUS not in served.attributes


def test_without_request_spans_the_calls_of_a_web_agent_are_marked_no_boundary(
    tmp_path: Path, policy: OpenAIServer, wired: dict[str, str]
) -> None:
    write(tmp_path, BARE, "bare.py")
    with serving(tmp_path, wired, ["uvicorn", "bare:app", *UVICORN[2:]]) as agent:
        assert [agent.get(f"/simple/{number}") for number in range(2)] == [200, 200]
    assert [request.baggage[keys.NO_BOUNDARY] for request in policy.requests] == ["true", "true"]


def test_with_the_boundary_process_a_web_agent_is_one_rollout(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    with serving(tmp_path, wired, TRAINSPAN_BOUNDARY="process") as agent:
        assert [agent.get(f"/simple/{number}") for number in range(2)] == [200, 200]
    rollout = recorder.one("trainspan.rollout")
    assert {request.baggage[keys.ROLLOUT_ID] for request in policy.requests} == {rollout.trace_id}
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 2
    assert not requests_of(recorder)


def test_with_the_boundary_explicit_only_the_blocks_within_requests_are_rollouts(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    with serving(tmp_path, wired, TRAINSPAN_BOUNDARY="explicit") as agent:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(agent.get, [f"/blocks/{n}" for n in range(4)])) == [200] * 4
        wait_for(policy, 4 * (2 + 2 * 3))
        recorder.wait_for(lambda seen: len(seen.named("openai.chat")) == 4 * (2 + 2 * 3))
    asked = rollouts_by_text(policy)
    assert asked.pop("outside") == [None] * 8
    assert {text: (len(ids), len(set(ids))) for text, ids in asked.items()} == {
        f"{n} {part}": (3, 1) for n in range(4) for part in "ab"
    }
    rollouts = {span.attributes[keys.TASK_ID]: span for span in recorder.named("trainspan.rollout")}
    assert {text: {span.attributes[keys.ROLLOUT_ID]} for text, span in rollouts.items()} == {
        text: set(ids) for text, ids in asked.items()
    }
    marked = [request for request in policy.requests if keys.NO_BOUNDARY in request.baggage]
    assert {request.body["messages"][0]["content"] for request in marked} == {"outside"}
    assert len(marked) == 8
    assert not requests_of(recorder)


def test_blocks_in_streaming_answers_are_rollouts_also_if_the_client_leaves(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    with serving(tmp_path, wired) as agent:
        for number in range(2):
            with urllib.request.urlopen(f"{agent.url}/stream/left%20{number}") as answer:
                assert answer.read(2) == b"0;"
        paths = ["/stream/whole", *(f"/stream-sync/{n}" for n in range(3)), "/simple/after", "/simple/seeded"]

        def read(path: str) -> int:
            with urllib.request.urlopen(agent.url + path) as answer:
                return len(answer.read())

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(read, paths)) == [400_008, 4, 4, 4, 2, 2]
        recorder.wait_for(lambda seen: len(seen.named("trainspan.rollout")) == 6)
    rollouts = {span.attributes.get(keys.TASK_ID): span for span in recorder.named("trainspan.rollout")}
    asked = rollouts_by_text(policy)
    assert {text: set(ids) for text, ids in asked.items() if text not in ("after", "seeded")} == {
        text: {span.attributes[keys.ROLLOUT_ID]} for text, span in rollouts.items() if text is not None
    }
    assert {text: len(ids) for text, ids in asked.items() if not text.startswith("left")} == {
        "whole": 8,
        **{str(n): 4 for n in range(3)},
        "after": 1,
        "seeded": 1,
    }
    rewards = {text: len(span.events) for text, span in rollouts.items() if not str(text).startswith("left")}
    assert rewards == {"whole": 4, "0": 2, "1": 2, "2": 2, None: 0}
    assert set(requests_of(recorder)) == {*asked["after"], *asked["seeded"]}, "though both seed their ids"
    assert asked["after"] != asked["seeded"]


def test_concurrent_explicit_rollouts_in_tasks_and_threads_do_not_mix(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = """
    import asyncio, concurrent.futures, trainspan
    from openai import AsyncOpenAI, OpenAI

    pool = concurrent.futures.ThreadPoolExecutor(3)
    client, async_client = OpenAI(), AsyncOpenAI()

    def ask(text):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

    async def agent(text):
        async with trainspan.rollout(task_id=text):
            await asyncio.gather(
                async_client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}]),
                asyncio.get_running_loop().run_in_executor(pool, ask, text),
                asyncio.to_thread(ask, text),
            )

    def agent_in_thread(text):
        with trainspan.rollout(task_id=text):
            list(pool.map(ask, [text] * 3))

    async def main():
        await asyncio.gather(*(agent(f"task {n}") for n in range(6)))
        await async_client.close()

    asyncio.run(main())
    with concurrent.futures.ThreadPoolExecutor(4) as outer:
        list(outer.map(agent_in_thread, [f"thread {n}" for n in range(4)]))
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stderr) == (0, "")
    assert len(policy.requests) == 30
    assert all(request.body["messages"][0]["content"] == request.baggage[keys.TASK_ID] for request in policy.requests)
    ids = {text: set(found) for text, found in rollouts_by_text(policy).items()}
    assert all(len(found) == 1 for found in ids.values())
    assert len(set().union(*ids.values())) == 10
    calls = {
        span.attributes.get(keys.TASK_ID): span.attributes[keys.ROLLOUT_CALLS]
        for span in recorder.named("trainspan.rollout")
    }
    assert calls == {**dict.fromkeys(ids, 3), None: 0}


def test_an_explicit_block_in_a_child_of_a_process_without_a_rollout_is_a_rollout(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    write(tmp_path, "import trainspan\nwith trainspan.rollout() as r: print(r.id, flush=True)", "child.py")
    source = """
    import subprocess, sys, trainspan
    subprocess.run([sys.executable, "child.py"], check=True)
    """
    ran = run(write(tmp_path, source), {**wired, **WITHOUT_OPENAI})
    (child,) = ran.stdout.split()
    rollouts = {span.attributes[keys.ROLLOUT_ID]: span for span in recorder.named("trainspan.rollout")}
    process = next(span for span in rollouts.values() if span.attributes[keys.ROLLOUT_BOUNDARY] == "process")
    assert rollouts[child].attributes[keys.ROLLOUT_BOUNDARY] == "explicit"
    assert child != process.attributes[keys.ROLLOUT_ID]


TESTS = """
    import os
    import httpx, pytest, trainspan

    def ask(text):
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body).raise_for_status()

    @pytest.mark.parametrize("text", ["one", "two"])
    def test_passes(text):
        ask(text)
        trainspan.reward(1.0)

    def test_fails():
        ask("three")
        assert 1 + 1 == 3

    @pytest.fixture
    def broken():
        yield
        raise KeyError("teardown")

    def test_breaks(broken):
        ask("four")

    def test_asks_nothing():
        pass
"""


@pytest.mark.parametrize("options", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)])
def test_each_test_of_pytest_is_a_rollout_and_a_failed_one_fails_alone(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], options: list[str]
) -> None:
    write(tmp_path, TESTS, "test_agent.py")
    command = ["opentelemetry-instrument", "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    extra = wired | WITHOUT_OPENAI | {"TRAINSPAN_BOUNDARY": "test"}
    done = subprocess.run(
        command, env=environment(extra), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 failed, 4 passed, 1 error in" in done.stdout, "and no warning of pytest's"
    rollouts = {span.attributes[keys.TASK_ID]: span for span in recorder.named(keys.ROLLOUT_SPAN_NAME)}
    assert {task: (span.attributes[keys.ROLLOUT_STATUS], span.attributes[keys.ROLLOUT_CALLS]) for task, span in rollouts.items()} == {
        "test_agent.py::test_passes[one]": ("ok", 1),
        "test_agent.py::test_passes[two]": ("ok", 1),
        "test_agent.py::test_fails": ("agent_error", 1),
        "test_agent.py::test_breaks": ("agent_error", 1),
    }  # fmt: skip
    assert len({span.trace_id for span in rollouts.values()}) == 4
    asked = {request.body["messages"][0]["content"]: request.baggage[keys.ROLLOUT_ID] for request in policy.requests}
    assert asked["three"] == rollouts["test_agent.py::test_fails"].attributes[keys.ROLLOUT_ID]
    rewarded = {log.attributes[keys.ROLLOUT_ID] for log in recorder.logs}
    assert rewarded == {asked["one"], asked["two"]}

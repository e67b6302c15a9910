"""Which model call came back last, in every kind of context and from every HTTP client."""

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry import context, trace
from opentelemetry.context import Context

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import run, write
from tests.support.otlp.recorder import OtlpRecorder, RecordedSpan
from trainspan._calls.http_clients import wrap_clients
from trainspan._calls.policy_request import PolicyRequest, answered
from trainspan._rollout.last_call import ReturnedCall, last_call
from trainspan._rollout.scope import Scope, remote_span
from trainspan._rollout.threads import watch_threads
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent

watch_threads()


@pytest.fixture
def scope() -> Iterator[Scope]:
    scope = Scope(Identity("r1"), "runner", remote_span(TraceParent("a" * 32, "1" * 16)))
    token = context.attach(scope.enter(Context()))
    yield scope
    context.detach(token)


def _call(scope: Scope, number: int, status: int = 200, header: str | None = None) -> None:
    """A request that the server answered as call `number`."""
    headers = {keys.HEADER_CALL: f"{number:016x}" if header is None else header}
    answered(PolicyRequest(scope, True, None, "POST"), status, headers)


def _last(scope: Scope) -> int | None:
    call = last_call(scope.beginning)
    return int(call, 16) if call else None


def test_the_last_call_is_the_one_that_came_back_last_and_no_failed_one(scope: Scope) -> None:
    assert _last(scope) is None
    _call(scope, 1)
    _call(scope, 2)
    _call(scope, 3, status=503)
    assert _last(scope) == 2


@pytest.mark.parametrize("header", ["", "12", "g" * 16, "0" * 17])
def test_a_server_that_names_no_call_leaves_none_known(scope: Scope, header: str) -> None:
    _call(scope, 1)
    _call(scope, 2, header=header)
    assert _last(scope) is None


def test_a_call_in_a_span_a_thread_or_a_pool_that_has_ended_is_the_last_one_outside(scope: Scope) -> None:
    _call(scope, 1)
    with trace.use_span(remote_span(TraceParent("a" * 32, "2" * 16))):
        _call(scope, 2)
    assert _last(scope) == 2
    thread = threading.Thread(target=_call, args=(scope, 3))
    thread.start()
    thread.join()
    assert _last(scope) == 3
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_call, scope, 4).result()
    assert _last(scope) == 4
    contextvars.copy_context().run(_call, scope, 5)
    assert _last(scope) == 5


@contextlib.contextmanager
def _client_span() -> Iterator[None]:
    """What the instrumentor of a client puts around each of its calls."""
    with trace.use_span(remote_span(TraceParent("a" * 32, "2" * 16))):
        yield


@pytest.mark.parametrize("around", [contextlib.nullcontext, _client_span], ids=["plain", "in a client's span"])
def test_a_task_that_another_one_waits_for_comes_before_it_and_tasks_side_by_side_have_each_their_own(
    scope: Scope, around: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    async def work(number: int, turn: asyncio.Event, following: asyncio.Event) -> int | None:
        await turn.wait()
        with around():
            _call(scope, number)
        following.set()
        await asyncio.sleep(0.01)  # the other one has called meanwhile
        assert await asyncio.to_thread(_last, scope) == number
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_last, scope).result() == number
        return _last(scope)

    async def main() -> None:
        with around():
            _call(scope, 1)
        await asyncio.wait_for(asyncio.create_task(_awaited()), 5)
        assert _last(scope) == 2
        events = [asyncio.Event() for _ in range(4)]
        events[0].set()
        found = await asyncio.gather(*(work(3 + number, events[number], events[number + 1]) for number in range(3)))
        assert found == [3, 4, 5]
        assert _last(scope) == 5

    async def _awaited() -> None:
        with around():
            _call(scope, 2)

    asyncio.run(main())


@pytest.mark.parametrize("around", [contextlib.nullcontext, _client_span], ids=["plain", "in a client's span"])
def test_threads_and_jobs_side_by_side_have_each_their_own_and_a_threads_next_job_none_of_an_earlier_one(
    scope: Scope, around: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    calls: dict[int, int | None] = {}
    turns = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        with around():
            _call(scope, number)
        turns[number - 1].set()
        turns[-1].wait(5)  # the other one has called meanwhile
        inner = threading.Thread(target=lambda: calls.update({number: _last(scope)}))
        inner.start()
        inner.join()
        assert _last(scope) == number

    def both(start: Callable[[int], object]) -> None:
        calls.clear()
        for turn in turns:
            turn.clear()
        for number in (1, 2):
            start(number)
            assert turns[number - 1].wait(5)
        turns[-1].set()

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    both(lambda number: threads[number - 1].start())
    for thread in threads:
        thread.join()
    assert calls == {1: 1, 2: 2}
    with ThreadPoolExecutor(2) as pool:
        jobs = []
        both(lambda number: jobs.append(pool.submit(work, number)))
        for job in jobs:
            job.result()
        assert calls == {1: 1, 2: 2}
        with around():
            _call(scope, 3)
        assert {pool.submit(_last, scope).result() for _ in range(4)} == {3}


def test_calls_of_another_rollout_do_not_count(scope: Scope) -> None:
    _call(scope, 1)
    other = Scope(Identity("r2"), "explicit", remote_span(TraceParent("b" * 32, "3" * 16)))
    token = context.attach(other.enter())
    assert _last(other) is None
    _call(other, 2)
    assert (_last(other), _last(scope)) == (2, 1)
    context.detach(token)
    assert _last(scope) == 1


def test_what_is_remembered_does_not_grow_with_calls(scope: Scope) -> None:
    for number in range(1, 200):
        _call(scope, number)
    gc.collect()
    alive = [one for one in gc.get_objects() if isinstance(one, ReturnedCall) and one.first is scope.beginning]
    assert len(alive) <= 3
    assert max(len(one._above) for one in alive) <= 3


def _ask_httpx(url: str) -> None:
    import httpx

    httpx.post(url, json={"messages": []})


def _ask_httpx_async(url: str) -> None:
    import httpx

    async def ask() -> None:
        async with httpx.AsyncClient() as client:
            await client.post(url, json={"messages": []})

    asyncio.run(ask())


def _ask_requests(url: str) -> None:
    import requests

    requests.post(url, json={"messages": []}, timeout=10)


def _ask_urllib3(url: str) -> None:
    import urllib3

    urllib3.request("POST", url, json={"messages": []})


def _ask_urllib(url: str) -> None:
    import urllib.request

    with contextlib.closing(urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"))):
        pass


def _ask_aiohttp(url: str) -> None:
    import aiohttp

    async def ask() -> None:
        async with aiohttp.ClientSession() as session, session.post(url, json={"messages": []}):
            pass

    asyncio.run(ask())


_CLIENTS: dict[str, Callable[[str], None]] = {
    "httpx": _ask_httpx,
    "httpx, asynchronous": _ask_httpx_async,
    "requests": _ask_requests,
    "urllib3": _ask_urllib3,
    "urllib": _ask_urllib,
    "aiohttp": _ask_aiohttp,
}


@pytest.mark.parametrize("client", _CLIENTS)
def test_every_client_reads_which_call_a_response_answers(
    client: str, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap_clients()
    with OpenAIServer(names_calls=True) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        for number in (1, 2):
            _CLIENTS[client](f"{server.url}/chat/completions")
            assert _last(scope) == number
    assert scope.calls == 2


def test_rewards_and_spans_name_the_last_call_and_a_chosen_id_is_a_new_attempt_in_each_run(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = """
    import trainspan
    from openai import OpenAI
    from opentelemetry import trace

    client = OpenAI()

    def ask(score):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
        with trace.get_tracer("agent").start_as_current_span(f"tool {score}"):
            trainspan.reward(score, of="call")

    for scores in ((1, 2), (3,)):
        with trainspan.rollout(rollout_id="job-17"):
            for score in scores:
                ask(score)
    """
    policy.names_calls = True
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stderr) == (0, "")
    attempts = [span.attributes[keys.ATTEMPT] for span in recorder.named("trainspan.rollout") if _is_job(span)]
    assert 1_700_000_000 < attempts[0] < attempts[1] < 2**31
    for score in (1, 2, 3):
        (tool,) = recorder.named(f"tool {score}")
        ((_, event),) = tool.events
        assert event[keys.EVALUATION_SCORE] == score
        assert event[keys.LAST_CALL] == tool.attributes[keys.LAST_CALL] == f"{score:016x}"
        (record,) = [log for log in recorder.logs if log.attributes.get(keys.EVALUATION_SCORE) == score]
        assert record.attributes[keys.LAST_CALL] == f"{score:016x}"


def _is_job(span: RecordedSpan) -> bool:
    return span.attributes.get(keys.ROLLOUT_ID) == "job-17"

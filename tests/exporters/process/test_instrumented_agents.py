"""`opentelemetry-instrument python agent.py` with the plain openai SDK: one rollout, revealed only to the policy."""

from pathlib import Path

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.clock import clock_id
from trainspan_schemas.telemetry.identity import Identity, TraceParent

pytestmark = pytest.mark.ci

ASK = """
    import asyncio, concurrent.futures, os, sys
    from openai import AsyncOpenAI, OpenAI

    def ask(client=None, **options):
        client = client or OpenAI(max_retries=0)
        return client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}], **options)
"""


def test_a_plain_script_is_one_rollout_in_one_trace_with_its_reward_by_plain_opentelemetry(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    policy.status = lambda number: 400 if number == 3 else 200
    source = f"""{ASK}
    from opentelemetry import trace

    client = OpenAI()
    ask(client)
    assert [chunk.choices[0].delta.content for chunk in ask(client, stream=True)] == ["ok"]
    try:
        ask(client)
    except Exception as error:
        print(type(error).__name__)
    trace.get_current_span().add_event(
        "gen_ai.evaluation.result", {{"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 1}}
    )
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stdout, ran.stderr) == (0, "BadRequestError\n", "")
    rollout = recorder.one("trainspan.rollout")
    assert rollout.parent_span_id == ""
    assert rollout.attributes == {
        keys.ROLLOUT_ID: rollout.trace_id,
        keys.ATTEMPT: 0,
        keys.SPLIT: "train",
        keys.ROLLOUT_STATUS: "ok",
        keys.ROLLOUT_BOUNDARY: "process",
        keys.ROLLOUT_CALLS: 2,
    }
    assert [event for event in rollout.events if event[0] == keys.EVALUATION_EVENT] == [
        (keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1})
    ]
    assert {span.trace_id for span in recorder.spans} == {rollout.trace_id}
    assert {span.attributes[keys.ROLLOUT_ID] for span in recorder.spans} == {rollout.trace_id}
    chats = {span.span_id for span in recorder.named("openai.chat")}
    assert [request.traceparent.trace_id for request in policy.requests if request.traceparent] == [
        rollout.trace_id
    ] * 3
    assert {request.traceparent.span_id for request in policy.requests if request.traceparent} == chats
    assert policy.requests[0].baggage == {
        keys.ROLLOUT_ID: rollout.trace_id,
        keys.ATTEMPT: "0",
        keys.SPLIT: "train",
        keys.CLOCK: clock_id(),
    }


def test_concurrent_calls_in_tasks_threads_and_pools_stay_in_the_rollouts_trace(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = f"""{ASK}
    import contextvars

    async def many():
        async with AsyncOpenAI() as client:
            await asyncio.gather(*(ask(client) for _ in range(4)))

    asyncio.run(many())
    client = OpenAI()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: ask(client), range(4)))
    contextvars.Context().run(ask, client)  # as in a thread that lost its context
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stderr) == (0, "")
    rollout = recorder.one("trainspan.rollout")
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 9
    assert {request.baggage[keys.ROLLOUT_ID] for request in policy.requests} == {rollout.trace_id}
    assert {span.attributes[keys.ROLLOUT_ID] for span in recorder.spans} == {rollout.trace_id}
    in_trace = [span for span in recorder.named("openai.chat") if span.trace_id == rollout.trace_id]
    assert len(in_trace) == 8


def test_identity_goes_to_the_policy_from_every_client_library_and_to_no_other_host(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = f"""{ASK}
    import aiohttp, httpx, httpx2, requests

    base = os.environ["OPENAI_BASE_URL"].replace("127.0.0.1", "localhost")

    async def post(url):
        async with aiohttp.ClientSession() as session, session.post(url, json={{}}) as response:
            await response.read()
        for library in (httpx, httpx2):
            async with library.AsyncClient(follow_redirects=True) as client:
                await client.post(url, json={{}})

    for url in (base + "/chat/completions", base + "/redirect", os.environ["OTHER"] + "/chat/completions"):
        requests.post(url, json={{}}, headers={{"baggage": "mine=1"}})
        for library in (httpx, httpx2):
            library.post(url, json={{}}, follow_redirects=True)
        asyncio.run(post(url))
    """
    with OpenAIServer() as other:
        policy.redirect = lambda path: other.url if path.endswith("/redirect") else None
        ran = run(write(tmp_path, source), {**wired, "OTHER": other.url})
    assert (ran.code, ran.stderr) == (0, "")
    rollout = recorder.one("trainspan.rollout")
    assert len(policy.requests) == 12
    for request in policy.requests:
        assert request.traceparent == TraceParent(rollout.trace_id, rollout.span_id)
        assert request.baggage[keys.ROLLOUT_ID] == rollout.trace_id
    assert policy.requests[0].baggage["mine"] == "1"
    assert len(other.requests) == 12
    assert [request.headers.get("baggage") for request in other.requests if "baggage" in request.headers] == [
        "mine=1"
    ] * 2
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 6


@pytest.mark.parametrize("library", ["httpx", "httpx2", "requests", "aiohttp"])
def test_a_library_that_is_the_programs_first_import_is_wrapped(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], library: str
) -> None:
    source = f"""
    import {library}
    import asyncio, os

    async def post(url):
        async with {library}.ClientSession() as session, session.post(url, json={{}}) as response:
            await response.read()

    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asyncio.run(post(url)) if "{library}" == "aiohttp" else {library}.post(url, json={{}})
    """
    ran = run(write(tmp_path, source), {**wired, **WITHOUT_OPENAI})
    assert (ran.code, ran.stderr) == (0, "")
    (request,) = policy.requests
    assert request.baggage[keys.ROLLOUT_ID] == recorder.one("trainspan.rollout").trace_id


@pytest.mark.parametrize(
    ("baggage", "event"),
    [("", ""), ("trainspan.rollout.id=r1,trainspan.attempt=" + "1" * 23, "event=malformed_identity")],
    ids=["no identity", "an attempt that no store can hold"],
)
def test_a_foreign_trace_without_an_identity_gets_a_new_rollout(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str], baggage: str, event: str
) -> None:
    parent = TraceParent("c" * 32, "d" * 16)
    traced = {"TRACEPARENT": str(parent), "BAGGAGE": baggage}
    ran = run(write(tmp_path, "print(1)"), {**wired, **WITHOUT_OPENAI, **traced})
    rollout = recorder.one("trainspan.rollout")
    assert (ran.code, ran.stderr.partition(";")[0]) == (0, event)
    assert rollout.attributes[keys.ROLLOUT_ID] != "r1"
    assert (rollout.trace_id, rollout.parent_span_id) == (parent.trace_id, parent.span_id)
    assert rollout.attributes[keys.ROLLOUT_STATUS] == "ok"
    assert rollout.attributes[keys.ROLLOUT_ID] not in (parent.trace_id, "")


def test_explicit_rollouts_in_a_process_have_their_own_traces_and_replace_its_rollout(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = f"""{ASK}
    import trainspan

    async def main():
        async with trainspan.rollout(task_id="t1", run_id="run", round=4, split="val") as r:
            await ask(AsyncOpenAI())
            trainspan.reward(0.5, explanation="half")
        r.reward(2.0, "style")

    asyncio.run(main())
    try:
        with trainspan.rollout(task_id="t2"):
            with trainspan.rollout(task_id="inner"):
                raise KeyError("gone")
    except KeyError:
        pass
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stderr) == (0, "")
    first, second, process = recorder.named("trainspan.rollout")
    assert keys.ROLLOUT_STATUS not in process.attributes
    assert process.attributes[keys.ROLLOUT_BOUNDARY] == "process"
    assert len({first.trace_id, second.trace_id, process.trace_id}) == 3
    assert first.links == [process.trace_id]
    identity = Identity.from_attributes(first.attributes)
    assert identity == Identity(first.attributes[keys.ROLLOUT_ID], "run", "t1", 0, 4, "val")
    assert (first.attributes[keys.ROLLOUT_STATUS], first.attributes[keys.ROLLOUT_CALLS]) == ("ok", 1)
    assert first.attributes[keys.ROLLOUT_BOUNDARY] == "explicit"
    assert Identity.from_attributes(policy.requests[0].baggage) == identity
    ((name, event),) = first.events
    assert name == keys.EVALUATION_EVENT
    assert event[keys.EVALUATION_SCORE] == 0.5
    assert event[keys.EVALUATION_EXPLANATION] == "half"
    assert event[keys.EVALUATION_SOURCE] == "agent"
    logs = {log.attributes[keys.EVALUATION_NAME]: log for log in recorder.logs}
    assert logs["reward"].attributes == event
    assert (logs["reward"].trace_id, logs["reward"].span_id) == (first.trace_id, first.span_id)
    assert logs["style"].attributes[keys.ROLLOUT_ID] == first.attributes[keys.ROLLOUT_ID]
    assert (second.attributes[keys.ROLLOUT_STATUS], second.error) == ("agent_error", True)
    assert recorder.one("trainspan.block").attributes[keys.TASK_ID] == "t2"


OWN_SDK = f"""{ASK}
    import trainspan
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    for _ in range(2):
        with trainspan.rollout() as r, provider.get_tracer("mine").start_as_current_span("work"):
            ask()
    """


def test_a_program_that_sets_up_the_sdk_itself_has_identity_from_its_first_rollout_on(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    ran = run(write(tmp_path, OWN_SDK), wired, instrument=False)
    assert (ran.code, ran.stderr) == (0, "")
    rollouts, works = recorder.named("trainspan.rollout"), recorder.named("work")
    ids = [rollout.attributes[keys.ROLLOUT_ID] for rollout in rollouts]
    assert [work.attributes[keys.ROLLOUT_ID] for work in works] == ids
    assert [rollout.attributes[keys.ROLLOUT_CALLS] for rollout in rollouts] == [1, 1]
    assert [request.baggage[keys.ROLLOUT_ID] for request in policy.requests] == ids
    assert [str(request.traceparent) for request in policy.requests] == [
        str(TraceParent(work.trace_id, work.span_id)) for work in works
    ]


def test_disabled_leaves_a_program_alone_that_sets_up_the_sdk_itself(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    ran = run(write(tmp_path, OWN_SDK), {**wired, "TRAINSPAN_DISABLED": "1"}, instrument=False)
    assert (ran.code, ran.stderr) == (0, "")
    assert [work.attributes for work in recorder.named("work")] == [{}, {}]
    assert [
        header for request in policy.requests for header in request.headers if header in ("baggage", "traceparent")
    ] == []


def test_disabled_leaves_the_agent_alone(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = f"""{ASK}
    import trainspan

    with trainspan.rollout() as r:
        r.reward(1.0)
        ask()
    print(len(r.id), sys.exit.__module__, os._exit.__module__)
    """
    ran = run(write(tmp_path, source), {**wired, "TRAINSPAN_DISABLED": "1"})
    assert (ran.code, ran.stdout) == (0, "32 sys posix\n")
    assert "baggage" not in policy.requests[0].headers
    assert not [span for span in recorder.spans if span.name.startswith("trainspan")]
    assert not recorder.logs


def test_with_an_explicit_boundary_the_process_is_not_a_rollout(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    ran = run(write(tmp_path, f"{ASK}\n    ask()"), {**wired, "TRAINSPAN_BOUNDARY": "explicit"})
    assert ran.code == 0
    assert [span.name for span in recorder.spans] == ["openai.chat"]
    assert policy.requests[0].baggage == {keys.NO_BOUNDARY: "true"}, "its calls are marked as outside any rollout"


@pytest.mark.parametrize("sampler", ["always_off", "parentbased_always_off"])
def test_a_sampler_that_drops_rollouts_is_named_once(tmp_path: Path, wired: dict[str, str], sampler: str) -> None:
    source = """
    import trainspan
    for _ in range(2):
        with trainspan.rollout():
            trainspan.reward(1.0)
    """
    ran = run(write(tmp_path, source), {**wired, "OTEL_TRACES_SAMPLER": sampler})
    assert ran.code == 0
    (line,) = ran.stderr.splitlines()
    assert f"event=not_sampled; the sampler of this program's tracer (OTEL_TRACES_SAMPLER={sampler}) drops" in line
    assert "not trained" in line

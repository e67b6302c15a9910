"""An agent's HTTP clients and exporters work as without trainspan: each call is named and counted once, and losses are their own."""

import textwrap
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys

pytestmark = pytest.mark.ci

NEWLINE = "\n"


RIDING = """
    import asyncio, aiohttp, httpx, os

    class OverAiohttp(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            async with aiohttp.ClientSession() as session:
                async with session.request(
                    request.method, str(request.url), data=await request.aread(), headers=dict(request.headers)
                ) as answer:
                    return httpx.Response(answer.status, content=await answer.read(), headers=answer.headers)

    async def main():
        async with httpx.AsyncClient(transport=OverAiohttp(), base_url=os.environ["OPENAI_BASE_URL"]) as client:
            for text in ("first", "second"):
                body = {"model": "policy", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}]}
                (await client.post("/chat/completions", json=body)).raise_for_status()

    asyncio.run(main())
"""


def test_a_client_used_as_anothers_transport_adds_no_call(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    ran = run(write(tmp_path, RIDING), wired | WITHOUT_OPENAI)
    assert ran.code == 0, ran.stderr
    (rollout,) = recorder.named(keys.ROLLOUT_SPAN_NAME)
    assert len(policy.requests) == 2
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 2
    for request in policy.requests:
        assert request.headers["baggage"].count(keys.ROLLOUT_ID) == 1
        assert f"{keys.GEN_AI_AGENT_NAME}=agent-" in request.headers["baggage"]


class _Slow(BaseHTTPRequestHandler):
    received: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        time.sleep(3)
        self.received.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def backend() -> Iterator[tuple[str, list[bytes]]]:
    """Runs the agent's own backend, which takes 3 seconds per export; yields its URL and what it received."""
    handler = type("Handler", (_Slow,), {"received": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", handler.received
        server.shutdown()


OWN = """
    import sys
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[1] if sys.argv[1:] else "{url}")))
    provider.get_tracer("own").start_span("the agent's own").end()
    provider.shutdown()
"""


def test_the_agents_own_exporter_keeps_its_timeout(
    tmp_path: Path, wired: dict[str, str], backend: tuple[str, list[bytes]]
) -> None:
    url, received = backend
    ran = run(write(tmp_path, OWN.format(url=url)), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")
    assert len(received) == 1
    assert b"the agent's own" in received[0]


def test_the_agents_own_exporter_reports_its_losses_itself(tmp_path: Path, wired: dict[str, str]) -> None:
    program = write(tmp_path, OWN.format(url="http://127.0.0.1:9/v1/traces"))
    bare = run(program, wired | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}, instrument=False)
    ran = run(program, wired | WITHOUT_OPENAI | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"})
    assert ran.code == bare.code == 0
    (said,) = (
        words for words in ("Failed to export spans batch", "Exception while exporting Span") if words in bare.stderr
    )
    assert said in ran.stderr
    assert "telemetry_lost" not in ran.stderr


CLIENTS = {
    "urllib": """
        import urllib.request
        def post(url, body):
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                return answer.status
    """,
    "urllib3": """
        import urllib3
        pool = urllib3.PoolManager(headers={"X-Own": "1"})
        def post(url, body):
            return pool.request("POST", url, json=body).status
    """,
    "requests": """
        import requests
        def post(url, body):
            return requests.post(url, json=body).status_code
    """,
    "aiohttp": """
        import asyncio, aiohttp
        async def ask(url, body):
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                return answer.status
        def post(url, body):
            return asyncio.run(ask(url, body))
    """,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_names_rollout_and_agent_and_counts_once(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str], client: str
) -> None:
    source = f"""
        import json, os, sys
        {textwrap.dedent(CLIENTS[client]).strip().replace(NEWLINE, NEWLINE + "        ")}
        body = {{"model": "policy", "messages": [{{"role": "system", "content": "s"}}, {{"role": "user", "content": "u"}}]}}
        assert post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) == 200
    """
    ran = run(write(tmp_path, source), wired | WITHOUT_OPENAI)
    assert (ran.code, ran.stderr) == (0, "")
    (rollout,) = recorder.named(keys.ROLLOUT_SPAN_NAME)
    (request,) = policy.requests
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 1
    assert request.traceparent is not None
    assert request.traceparent.trace_id == rollout.trace_id
    assert request.baggage[keys.ROLLOUT_ID] == rollout.attributes[keys.ROLLOUT_ID]
    assert request.baggage[keys.GEN_AI_AGENT_NAME].startswith("agent-")


CALL = """
        import openai
        openai.OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "u"}])
"""


@pytest.mark.parametrize(
    "first",
    [
        "",
        "warnings.simplefilter('error')",
        "from opentelemetry.instrumentation.openai import OpenAIInstrumentor",
    ],
    ids=["openai", "warnings are errors", "its instrumentor"],
)
def test_openais_instrumentor_is_loaded_once_and_only_with_openai(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str], first: str
) -> None:
    source = f"""
        import sys, warnings
        print([name for name in ("openai", "pydantic", "httpx2", "aiohttp") if name in sys.modules])
        {first}
        {CALL.strip()}
    """
    ran = run(write(tmp_path, source), wired)
    assert (ran.code, ran.stdout, ran.stderr) == (0, "[]\n", "")
    rollout = recorder.one(keys.ROLLOUT_SPAN_NAME)
    (call,) = (span for span in recorder.spans if "gen_ai.request.model" in span.attributes)
    assert call.trace_id == rollout.trace_id
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 1

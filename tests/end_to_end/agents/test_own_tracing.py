"""Agents that set up a vendor's tracing themselves: every span is in one trace, here and at the vendor's, and nothing is on stderr."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.agents.debian_go import GoToolchain
from tests.support.agents.node_sdk import install_node_sender
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import execute, write
from tests.support.collector.process import ANY_PORT, CollectorProcess, running, select
from tests.support.otlp.http_backend import HttpBackend
from tests.support.places import ROOT

VENDORS = {
    "logfire": (
        ["logfire"],
        "import logfire\n"
        "logfire.configure(token='pylf_v1_local_x', console=False, inspect_arguments=False,"
        " advanced=logfire.AdvancedOptions(base_url=vendor))",
    ),
    "langfuse": (
        ["langfuse"],
        "from langfuse import Langfuse\n"
        "client = Langfuse(public_key='pk', secret_key='sk', host=vendor, should_export_span=lambda span: True)",
    ),
    "phoenix": (
        ["arize-phoenix-otel"],
        "from phoenix.otel import register\nregister(endpoint=f'{vendor}/v1/traces', batch=True, verbose=False)",
    ),
    "traceloop": (
        ["traceloop-sdk", "httpx"],
        "from traceloop.sdk import Traceloop\n"
        "Traceloop.init('agent', api_endpoint=vendor, api_key='x', telemetry_enabled=False)",
    ),
    "openlit": (
        ["openlit"],
        "import openlit, pathlib\npathlib.Path('pricing.json').write_text('{}')\n"
        "openlit.init(otlp_endpoint=vendor, disable_metrics=True, pricing_json='pricing.json')",
    ),
    "otlp-http": (
        ["opentelemetry-exporter-otlp-proto-http"],
        "from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter\n"
        "from opentelemetry.sdk.trace.export import BatchSpanProcessor\n"
        "for endpoint in (f'{vendor}/v1/traces', None):\n"
        "    trace.get_tracer_provider().add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))",
    ),
    "logfire by environment": (["logfire"], "import logfire\nlogfire.configure(send_to_logfire=False, console=False)"),
    "opentelemetry-instrument by environment": (["opentelemetry-exporter-otlp-proto-http"], ""),
}
"""Name → its packages, and the lines that set it up to send to `vendor`, unless the environment does."""
AGENT = """
import sys
from opentelemetry import trace
vendor = sys.argv[1]
{setup}
import openai
tracer = trace.get_tracer("agent")
with tracer.start_as_current_span("invoke_agent weather"):
    for turn in range(3):
        openai.OpenAI().chat.completions.create(model="policy", messages=[{{"role": "user", "content": "hi"}}])
        with tracer.start_as_current_span("execute_tool look"):
            pass
"""


@pytest.fixture
def vendor() -> Iterator[HttpBackend]:
    with HttpBackend() as backend:
        yield backend


def stored(collector: CollectorProcess) -> dict[str, set[str]]:
    """Trace id → names of its spans, once a rollout's own span is there."""
    deadline = time.monotonic() + 10
    while True:
        names: dict[str, set[str]] = {}
        for trace_id, span in select(collector.address, "SELECT trace_id, name FROM spans"):
            names.setdefault(trace_id, set()).add(span)
        if any("trainspan.rollout" in of_trace for of_trace in names.values()) or time.monotonic() > deadline:
            return names
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VENDORS)
def test_an_agent_with_a_tracing_of_its_own_is_whole_here_and_there(
    tmp_path: Path, uv: Path, vendor: HttpBackend, name: str
) -> None:
    packages, setup = VENDORS[name]
    place = tmp_path / "environment"
    subprocess.run([uv, "venv", "-q", "-p", sys.executable, place], check=True, timeout=120)
    install = [uv, "pip", "install", "-q", "-p", place / "bin" / "python", "openai", *packages, str(ROOT)]
    subprocess.run(install, check=True, timeout=400)
    agent = write(tmp_path, AGENT.format(setup=setup))
    with running(tmp_path / "spans.duckdb", "--http", ANY_PORT) as collector, OpenAIServer() as policy:
        extra = {
            "TRAINSPAN_COLLECTOR__STORE": str(tmp_path / "spans.duckdb"),
            "OPENAI_BASE_URL": policy.url,
            "OPENAI_API_KEY": "none",
            "OPENLIT_TELEMETRY": "false",
            "LOGFIRE_IGNORE_NO_CONFIG": "1",
        }
        if name.endswith("environment"):
            extra |= {"OTEL_EXPORTER_OTLP_ENDPOINT": vendor.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        command = [str(place / "bin" / "opentelemetry-instrument"), str(place / "bin" / "python"), str(agent)]
        ran = execute([*command, vendor.url], tmp_path, extra)
        assert ran.code == 0, ran.stderr

        here = stored(collector)
    assert ran.stderr == ""
    assert len(here) == 1
    ((trace_id, names),) = here.items()
    assert {"invoke_agent weather", "execute_tool look", "trainspan.rollout"} <= names
    if name != "openlit":  # it leaves the export to a provider that is set before it
        assert {"invoke_agent weather", "execute_tool look"} <= vendor.spans[trace_id]


PROGRAMS = Path(__file__).parent / "programs"


def node_agent(folder: Path) -> tuple[list[str], set[str]]:
    """The command of an agent with all exporters of its SDK, and the names of its spans."""
    install_node_sender(folder)
    shutil.copy(PROGRAMS / "exporters.mjs", folder)
    return ["node", "exporters.mjs"], {"grpc", "http-protobuf", "http-json"}


def go_agent(folder: Path) -> tuple[list[str], set[str]]:
    GoToolchain.unpack(folder / "go").build(PROGRAMS / "exporters.go", folder / "agent")
    return [str(folder / "agent")], {"grpc", "http-protobuf"}


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [node_agent, go_agent])
def test_every_exporter_of_node_and_go_sends_here_and_to_a_backend(
    tmp_path: Path, vendor: HttpBackend, make: Callable[[Path], tuple[list[str], set[str]]]
) -> None:
    agent, names = make(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "a", "input": "x"}) + "\n")
    with running(tmp_path / "home" / "spans.duckdb", "--http", ANY_PORT) as collector, OpenAIServer() as policy:
        options = ["--tasks", "tasks.jsonl", "--n", "1", "--policy-url", policy.url]
        shell = ["sh", "-c", '"$@" 2> stderr.txt', "sh", *agent, vendor.url]
        command = [sys.executable, "-m", "trainspan_cli", "rollout", *options, "--", *shell]
        settings = {"TRAINSPAN_COLLECTOR__ENDPOINTS": f"http://{collector.address.grpc}"}
        ran = execute(command, tmp_path, {**settings, "TRAINSPAN_HOME": str(tmp_path / "home")})
        assert ran.code == 0, ran.stderr
        here = stored(collector)
    assert (tmp_path / "stderr.txt").read_text() == ""
    assert here == {trace_id: {"trainspan.rollout", *names} for trace_id in here}
    assert len(here) == 1
    assert vendor.spans == dict.fromkeys(here, names)

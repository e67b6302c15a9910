"""Agents that set up a vendor's tracing themselves: every span is in one trace, here and at the vendor's, and nothing is on stderr."""

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import execute, write
from tests.support.collector.process import ANY_PORT, running, select
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
}
"""Name → its packages, and the lines that set it up to send to `vendor`."""
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


class Vendor:
    """A backend of a vendor: it takes OTLP/HTTP under any path."""

    def __init__(self) -> None:
        self.spans: dict[str, set[str]] = {}
        """Trace id → names."""
        vendor = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if "traces" in self.path:
                    vendor.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", "57")
                self.end_headers()
                self.wfile.write(b'{"project_name": "agent", "project_url": "http://vendor"}')

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.trace_id.hex(), set()).add(span.name)


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    backend = Vendor()
    thread = threading.Thread(target=backend.server.serve_forever)
    thread.start()
    yield backend
    backend.server.shutdown()
    thread.join()
    backend.server.server_close()


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", "uv"], check=True, timeout=300)
    return folder / "bin" / "uv"


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VENDORS)
def test_an_agent_with_a_tracing_of_its_own_is_whole_here_and_there(
    tmp_path: Path, uv: Path, vendor: Vendor, name: str
) -> None:
    packages, setup = VENDORS[name]
    place = tmp_path / "environment"
    subprocess.run([uv, "venv", "-q", "-p", sys.executable, place], check=True, timeout=120)
    install = [uv, "pip", "install", "-q", "-p", place / "bin" / "python", "openai", *packages, str(ROOT)]
    subprocess.run(install, check=True, timeout=400)
    agent = write(tmp_path, AGENT.format(setup=setup))
    with running(tmp_path / "spans.duckdb", "--http", ANY_PORT) as collector, OpenAIServer() as policy:
        extra = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address.grpc}",
            "TRAINSPAN_COLLECTOR__STORE": str(tmp_path / "spans.duckdb"),
            "OPENAI_BASE_URL": policy.url,
            "OPENAI_API_KEY": "none",
            "OPENLIT_TELEMETRY": "false",
            "LOGFIRE_IGNORE_NO_CONFIG": "1",
        }
        command = [str(place / "bin" / "opentelemetry-instrument"), str(place / "bin" / "python"), str(agent)]
        ran = execute([*command, vendor.url], tmp_path, extra)
        assert ran.code == 0, ran.stderr

        def stored() -> dict[str, set[str]]:
            found: dict[str, set[str]] = {}
            for trace_id, span in select(collector.address, "SELECT trace_id, name FROM spans"):
                found.setdefault(trace_id, set()).add(span)
            return found

        deadline = time.monotonic() + 10
        while not any("trainspan.rollout" in names for names in stored().values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        here = stored()
    assert ran.stderr == ""
    assert len(here) == 1
    ((trace_id, names),) = here.items()
    assert {"invoke_agent weather", "execute_tool look", "trainspan.rollout"} <= names
    if name != "openlit":  # it leaves the export to a provider that is set before it
        assert {"invoke_agent weather", "execute_tool look"} <= vendor.spans[trace_id]

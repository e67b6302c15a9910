"""Programs whose `OTEL_EXPORTER_OTLP_*` name a backend of their own: everything is there, and at the collector of the state folder."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.collector.process import CollectorProcess, running, select
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.store.otlp_variables import (
    ENDPOINT,
    ENV_COLLECTOR,
    ENV_PROGRAM,
    exchange,
    own_variables,
    set_aside,
)

pytestmark = pytest.mark.ci

HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
WORK = """
import os, subprocess, sys, trainspan
from opentelemetry import trace
{setup}
with trace.get_tracer("agent").start_as_current_span("work"):
    trainspan.reward(0.5)
assert (os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"], os.environ["OTEL_EXPORTER_OTLP_HEADERS"]) == (sys.argv[1], "x-key=mine")
child = "from opentelemetry import trace; trace.get_tracer('agent').start_span('work of a child').end()"
subprocess.run([sys.executable, "-c", child], check=True)
"""
OWN_PROVIDER = """
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
"""


def _names_here(collector: CollectorProcess) -> Counter[str]:
    return Counter(name for (name,) in select(collector.address, "SELECT name FROM spans"))


@pytest.mark.parametrize(("setup", "at_exit"), [("", 1), (OWN_PROVIDER, 0)], ids=["no set-up", "a provider"])
def test_a_backend_named_by_the_environment_gets_what_the_collector_gets(
    tmp_path: Path, policy: OpenAIServer, setup: str, at_exit: int
) -> None:
    agent = write(tmp_path, WORK.format(setup=setup))
    with running(tmp_path / "home" / "spans.duckdb") as collector, OtlpRecorder() as backend:
        agent.write_text(agent.read_text().replace("sys.argv[1]", repr(backend.endpoint)))
        own = {ENDPOINT: backend.endpoint, HEADERS: "x-key=mine", "TRAINSPAN_HOME": str(tmp_path / "home")}
        ran = run(agent, {**WITHOUT_OPENAI, **own})
        assert (ran.code, ran.stderr) == (0, "")
        here = _names_here(collector)
        rewards = select(collector.address, "SELECT score, untrusted FROM evaluations")
    there = Counter(span.name for span in backend.spans)
    # The rollout's own span is of the provider that the process began with; the child is a process without a set-up of its own.
    assert here == {"work": 1, "work of a child": 1, "trainspan.rollout": 1, "trainspan.process": 1}
    assert there["work"] == there["work of a child"] == 1
    assert there["trainspan.rollout"] == at_exit
    assert rewards == [(0.5, False)], "the token of the state folder went to its collector"
    assert len(backend.logs) == 1
    assert {span.trace_id for span in backend.spans} == {backend.spans[0].trace_id}


def test_variables_are_the_backends_unless_they_name_a_collector() -> None:
    collectors = ["127.0.0.1:4317", "http://127.0.0.1:4318"]
    environ = {"PATH": "/bin", ENDPOINT: "http://localhost:4318", "OTEL_EXPORTER_OTLP_TIMEOUT": "3"}
    assert own_variables(environ, collectors) == {}
    environ[ENDPOINT] = "http://localhost:9318"
    assert own_variables(environ, collectors) == {name: value for name, value in environ.items() if name != "PATH"}
    traces = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h/v1/traces", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=b"}
    assert own_variables({**traces, HEADERS: "c=d"}, collectors) == traces


def test_each_set_of_variables_comes_back_as_it_was() -> None:
    own = {ENDPOINT: "https://backend", "OTEL_EXPORTER_OTLP_CERTIFICATE": "ca.pem"}
    environ = {"PATH": "/bin", **own}
    set_aside(environ, own)
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in environ, "it may be the collector's"
    environ |= {ENDPOINT: "http://c", HEADERS: "authorization=x"}
    of_collector = dict(environ)
    assert exchange(environ, ENV_PROGRAM, ENV_COLLECTOR)
    assert {name: value for name, value in environ.items() if name != ENV_COLLECTOR} == {"PATH": "/bin", **own}
    assert exchange(environ, ENV_COLLECTOR, ENV_PROGRAM)
    assert environ == of_collector
    set_aside(environ, {})
    assert not exchange(environ, ENV_PROGRAM, ENV_COLLECTOR)

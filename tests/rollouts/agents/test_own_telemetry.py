"""Agents in other languages with their own OpenTelemetry join the runner's rollout through TRACEPARENT and BAGGAGE alone."""

from pathlib import Path

import pytest

from tests.rollouts.conftest import Run
from tests.support.agents.debian_go import GoToolchain
from tests.support.agents.node_sdk import install_node_sender
from tests.support.agents.openai_server import OpenAIServer
from tests.support.otlp.recorder import OtlpRecorder
from tests.support.places import ROOT
from trainspan_schemas.store.otlp_variables import ENDPOINT
from trainspan_schemas.telemetry import keys

NODE_AGENT = """
import { ROOT_CONTEXT, propagation, trace } from "@opentelemetry/api";
import { CompositePropagator, W3CBaggagePropagator, W3CTraceContextPropagator } from "@opentelemetry/core";
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-grpc";
import { BasicTracerProvider, BatchSpanProcessor } from "@opentelemetry/sdk-trace-base";

const provider = new BasicTracerProvider({ spanProcessors: [new BatchSpanProcessor(new OTLPTraceExporter())] });
propagation.setGlobalPropagator(
  new CompositePropagator({ propagators: [new W3CTraceContextPropagator(), new W3CBaggagePropagator()] }),
);
const fromRunner = propagation.extract(ROOT_CONTEXT, {
  traceparent: process.env.TRACEPARENT,
  baggage: process.env.BAGGAGE,
});
const span = provider.getTracer("agent").startSpan("node work", {}, fromRunner);
const headers = { "content-type": "application/json" };
propagation.inject(trace.setSpan(fromRunner, span), headers);
const body = JSON.stringify({ model: "policy", messages: [{ role: "user", content: "hello" }] });
const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, { method: "POST", headers, body });
if (!answer.ok) throw new Error(String(answer.status));
span.end();
await provider.shutdown();
"""
GO_AGENT = ROOT / "tests/end_to_end/matrix/programs/go/own_telemetry.go"
TASKS = [{"id": "a b", "input": "x"}, {"id": "c, d=é", "input": "y"}]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_a_node_agent_joins_the_runners_rollout_by_its_environment(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, tmp_path: Path
) -> None:
    install_node_sender(tmp_path)
    (tmp_path / "agent.mjs").write_text(NODE_AGENT)
    result = run("", TASKS, "node", "agent.mjs")
    assert result.status == {"ok": 2}
    _check_joined(policy, recorder, "node work", calls=1)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
def test_a_go_agent_joins_the_runners_rollout_by_its_environment(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, tmp_path: Path
) -> None:
    GoToolchain.unpack(tmp_path / "go").build(GO_AGENT, tmp_path / "agent")
    result = run("", TASKS, str(tmp_path / "agent"))
    assert result.status == {"ok": 2}
    _check_joined(policy, recorder, "go work", calls=2)


def _check_joined(policy: OpenAIServer, recorder: OtlpRecorder, name: str, calls: int) -> None:
    """Each rollout has one span `name` as a child, and `calls` requests below it that carry the rollout's identity."""
    rollouts = {span.trace_id: span for span in recorder.named(keys.ROLLOUT_SPAN_NAME)}
    works = {span.trace_id: span for span in recorder.named(name)}
    parents = {span.span_id: span.parent_span_id for span in recorder.spans}
    assert len(rollouts) == 2
    assert rollouts.keys() == works.keys()
    assert len(policy.requests) == 2 * calls
    for trace_id, rollout in rollouts.items():
        work = works[trace_id]
        assert work.parent_span_id == rollout.span_id
        own = [one for one in policy.requests if one.traceparent and one.traceparent.trace_id == trace_id]
        assert len(own) == calls
        for request in own:
            assert request.traceparent is not None
            sender = request.traceparent.span_id  # the agent's span, or its HTTP client's below it
            assert work.span_id in (sender, parents[sender])
            for key in (keys.ROLLOUT_ID, keys.TASK_ID, keys.RUN_ID, keys.SPLIT):
                assert request.baggage[key] == rollout.attributes[key]


BACKEND_AGENT = """
from opentelemetry import trace

def solve(task=None):
    with trace.get_tracer("agent").start_as_current_span("work"):
        return 1.0

if __name__ == "__main__":
    solve()
"""


@pytest.mark.ci
@pytest.mark.parametrize("target", [("agent:solve",), ("python", "agent.py")])
def test_a_backend_that_the_runners_environment_names_gets_the_agents_spans_too(
    run: Run, recorder: OtlpRecorder, monkeypatch: pytest.MonkeyPatch, target: tuple[str, ...]
) -> None:
    with OtlpRecorder() as backend:
        monkeypatch.setenv(ENDPOINT, backend.endpoint)
        assert run(BACKEND_AGENT, TASKS, *target).status == {"ok": 2}
        backend.wait_for(lambda seen: len(seen.named("work")) == 2)
    here, there = ([span.span_id for span in seen.named("work")] for seen in (recorder, backend))
    assert len(here) == 2
    assert sorted(here) == sorted(there)

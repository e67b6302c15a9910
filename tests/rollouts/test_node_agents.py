"""A Node agent with its own OpenTelemetry joins the runner's rollout through TRACEPARENT and BAGGAGE alone."""

from pathlib import Path

import pytest

from tests.rollouts.conftest import Run
from tests.support.node_sdk import install_node_sender
from tests.support.openai_server import OpenAIServer
from tests.support.otlp_recorder import OtlpRecorder
from trainspan_schemas import keys

AGENT = """
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


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_a_node_agent_joins_the_runners_rollout_by_its_environment(
    run: Run, policy: OpenAIServer, recorder: OtlpRecorder, tmp_path: Path
) -> None:
    install_node_sender(tmp_path)
    (tmp_path / "agent.mjs").write_text(AGENT)
    result = run("", [{"id": "a b", "input": "x"}, {"id": "c", "input": "y"}], "node", "agent.mjs")
    assert result.status == {"ok": 2}
    rollouts = {span.trace_id: span for span in recorder.named(keys.ROLLOUT_SPAN_NAME)}
    works = {span.trace_id: span for span in recorder.named("node work")}
    requests = {request.traceparent.trace_id: request for request in policy.requests if request.traceparent}
    assert len(rollouts) == 2
    assert rollouts.keys() == works.keys() == requests.keys()
    for trace_id, rollout in rollouts.items():
        assert works[trace_id].parent_span_id == rollout.span_id
        request = requests[trace_id]
        assert request.traceparent is not None
        assert request.traceparent.span_id == works[trace_id].span_id
        for key in (keys.ROLLOUT_ID, keys.TASK_ID, keys.RUN_ID, keys.SPLIT):
            assert request.baggage[key] == rollout.attributes[key]

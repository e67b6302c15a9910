"""A small agent, run by record.py in an environment with one instrumentation (or two): `agent.py DIALECT`."""

import contextlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any

import openai
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

SYSTEM = {"role": "system", "content": "You are a calculator."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


CAPTURES = {
    "official": "SPAN_ONLY",
    "mixed": "SPAN_ONLY",
    "official_event": "EVENT_ONLY",  # one log record per call, with all its messages
    "official_messages": "true",  # one log record per message, as before version 1.37 of the conventions
}
"""Dialect of OpenTelemetry's own instrumentation → setting for the place of messages."""


def instrument(dialect: str, provider: TracerProvider, logs: LoggerProvider) -> list[str]:
    """Enables the instrumentation; returns the distributions used."""
    used = []
    if dialect in CAPTURES:
        os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = CAPTURES[dialect]
        if CAPTURES[dialect] != "true":
            os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
        from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=provider, logger_provider=logs)
        used.append("opentelemetry-instrumentation-openai-v2")
    if dialect in ("traceloop", "traceloop_flat"):
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor as Traceloop

        Traceloop().instrument(tracer_provider=provider)
        used.append("opentelemetry-instrumentation-openai")
    if dialect in ("openinference", "openinference_feedback", "mixed"):
        from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference

        OpenInference().instrument(tracer_provider=provider)
        used.append("openinference-instrumentation-openai")
    return used


def traced(request: Any) -> None:
    """Adds the traceparent header, like trainspan's own hook."""
    propagate.inject(request.headers)


def feedback(results: list[dict[str, Any]], noun: str, scope: str = "span") -> dict[str, Any]:
    """OpenInference's own encoding."""
    from openinference.instrumentation import get_annotation_attributes, get_evaluation_attributes

    encode = get_annotation_attributes if noun == "annotation" else get_evaluation_attributes
    return dict(encode(**{f"{noun}s": results}, scope=scope))


def give_feedback(tracer: trace.Tracer, run: trace.Span) -> None:
    """After the run has ended: separate spans, in separate traces, with links to their subjects."""
    link = [trace.Link(run.get_span_context())]
    kind = {"openinference.span.kind": "EVALUATOR"}
    of_span = feedback([{"name": "reward", "score": 2, "label": "good", "annotator_kind": "LLM"}], "evaluation")
    with tracer.start_as_current_span("judge a span", context=Context(), links=link, attributes={**kind, **of_span}):
        pass
    of_trace = feedback([{"name": "reward", "score": 0.25, "annotator_kind": "HUMAN"}], "annotation", "trace")
    with tracer.start_as_current_span("judge a trace", context=Context(), links=link, attributes=of_trace):
        pass
    with tracer.start_as_current_span("judge by an event", context=Context(), links=link, attributes=kind) as span:
        said = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 4.0}
        span.add_event("gen_ai.evaluation.result", said)


def main(dialect: str) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "calculator"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(insecure=True)))
    trace.set_tracer_provider(provider)
    logs = LoggerProvider(resource=Resource({"service.name": "calculator"}))
    logs.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter(insecure=True)))
    used = instrument(dialect, provider, logs)
    tracer = trace.get_tracer("agent")
    hooks = {"request": [traced]}
    client = openai.OpenAI(http_client=openai.DefaultHttpxClient(event_hooks=hooks), max_retries=0)
    ask = client.chat.completions.create
    extra = {"extra_body": {"return_token_ids": True}, "logprobs": True, "temperature": 1.0, "model": "policy"}
    with tracer.start_as_current_span("run") as run:
        messages = [SYSTEM, {"role": "user", "content": "tool: 2+2?"}]
        first = ask(messages=messages, tools=[TOOL], **extra).choices[0].message
        call = first.tool_calls[0]
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.function.name}
        with tracer.start_as_current_span("execute_tool add", attributes=attributes) as step:
            result = json.dumps(4)
            if dialect == "openinference_feedback":  # while the step is open: on the step itself
                judged = {"name": "reward", "score": 0.5, "annotator_kind": "CODE", "identifier": "unit-test"}
                step.set_attributes(feedback([judged], "annotation"))
        asked = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": result}]
        ask(messages=messages, tools=[TOOL], **extra)
        for _ in ask(messages=[SYSTEM, {"role": "user", "content": "stream"}], stream=True, **extra):
            pass
        ask(messages=[SYSTEM, {"role": "user", "content": "two"}], n=2, **extra)
        with contextlib.suppress(openai.APIError):
            ask(messages=[SYSTEM, {"role": "user", "content": "fail"}], **extra)
    if dialect == "openinference_feedback":
        give_feedback(tracer, run)
        used.append("openinference-semantic-conventions")
    provider.shutdown()
    logs.shutdown()
    sys.stdout.write(json.dumps({name: version(name) for name in [*used, "openai", "opentelemetry-sdk"]}))


main(sys.argv[1])

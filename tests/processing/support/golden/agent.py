"""A small agent, run by record.py in an environment with one instrumentation (or two): `agent.py DIALECT`."""

import contextlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any

import openai
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

SYSTEM = {"role": "system", "content": "You are a calculator."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def instrument(dialect: str, provider: TracerProvider) -> list[str]:
    """Switches the instrumentation on; returns the distributions that did."""
    used = []
    if dialect in ("official", "mixed"):
        os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
        os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"
        from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

        OpenAIInstrumentor().instrument(tracer_provider=provider)
        used.append("opentelemetry-instrumentation-openai-v2")
    if dialect in ("traceloop", "traceloop_flat"):
        from opentelemetry.instrumentation.openai import OpenAIInstrumentor as Traceloop

        Traceloop().instrument(tracer_provider=provider)
        used.append("opentelemetry-instrumentation-openai")
    if dialect in ("openinference", "mixed"):
        from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference

        OpenInference().instrument(tracer_provider=provider)
        used.append("openinference-instrumentation-openai")
    return used


def traced(request: Any) -> None:
    """The traceparent that trainspan's own hook sends."""
    propagate.inject(request.headers)


def main(dialect: str) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "calculator"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(insecure=True)))
    trace.set_tracer_provider(provider)
    used = instrument(dialect, provider)
    tracer = trace.get_tracer("agent")
    hooks = {"request": [traced]}
    client = openai.OpenAI(http_client=openai.DefaultHttpxClient(event_hooks=hooks), max_retries=0)
    ask = client.chat.completions.create
    extra = {"extra_body": {"return_token_ids": True}, "logprobs": True, "temperature": 1.0, "model": "policy"}
    with tracer.start_as_current_span("run"):
        messages = [SYSTEM, {"role": "user", "content": "tool: 2+2?"}]
        first = ask(messages=messages, tools=[TOOL], **extra).choices[0].message
        call = first.tool_calls[0]
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.function.name}
        with tracer.start_as_current_span("execute_tool add", attributes=attributes):
            result = json.dumps(4)
        asked = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": result}]
        ask(messages=messages, tools=[TOOL], **extra)
        for _ in ask(messages=[SYSTEM, {"role": "user", "content": "stream"}], stream=True, **extra):
            pass
        ask(messages=[SYSTEM, {"role": "user", "content": "two"}], n=2, **extra)
        with contextlib.suppress(openai.APIError):
            ask(messages=[SYSTEM, {"role": "user", "content": "fail"}], **extra)
    provider.shutdown()
    sys.stdout.write(json.dumps({name: version(name) for name in [*used, "openai", "opentelemetry-sdk"]}))


main(sys.argv[1])

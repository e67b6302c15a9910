"""How each SDK is set up, as its documentation says, and how its users give an agent's run a root span and a score.

The ids of traces are chosen, so that the rollouts of all SDKs have the same order.
"""

import contextlib
import importlib

from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class Ids(RandomIdGenerator):
    """`next_trace` is the next trace's id, in hex."""

    next_trace = ""

    def generate_trace_id(self):
        return int(Ids.next_trace, 16)


class Native:
    """trainspan, under `opentelemetry-instrument`."""

    def __init__(self, _url):
        self._trainspan = importlib.import_module("trainspan")

    @contextlib.contextmanager
    def rollout(self, trace_id, score):
        with self._trainspan.rollout(rollout_id=trace_id, attempt=0) as rollout:
            yield
            rollout.reward(score)

    def end(self):
        pass


class OpenInference:
    """OpenInference's instrumentation with OpenTelemetry's exporter; the score is an annotation on the root span."""

    def __init__(self, url):
        from openinference.instrumentation.openai import OpenAIInstrumentor
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(id_generator=Ids())
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/v1/traces")))
        OpenAIInstrumentor().instrument(tracer_provider=self._provider)

    @contextlib.contextmanager
    def rollout(self, trace_id, score):
        Ids.next_trace = trace_id
        with self._provider.get_tracer("agent").start_as_current_span("agent") as span:
            span.set_attribute("openinference.span.kind", "AGENT")
            yield
            span.set_attribute("annotations.0.annotation.name", "reward")
            span.set_attribute("annotations.0.annotation.score", score)

    def end(self):
        self._provider.force_flush()


class Phoenix:
    """Phoenix's `register`; scores are annotations that are made in Phoenix afterwards."""

    def __init__(self, url):
        from phoenix.otel import register

        self._provider = register(
            endpoint=f"{url}/v1/traces", batch=True, auto_instrument=True, verbose=False, id_generator=Ids()
        )

    @contextlib.contextmanager
    def rollout(self, trace_id, score):
        Ids.next_trace = trace_id
        with self._provider.get_tracer("agent").start_as_current_span("agent", openinference_span_kind="agent"):
            yield

    def end(self):
        self._provider.force_flush()


class Langfuse:
    """Langfuse's SDK and its client of openai; scores are sent by the SDK, beside the spans."""

    def __init__(self, url):
        from langfuse import Langfuse
        from opentelemetry.sdk.trace import TracerProvider

        provider = TracerProvider(id_generator=Ids())
        self._client = Langfuse(public_key="pk", secret_key="sk", base_url=url, tracer_provider=provider)

    @contextlib.contextmanager
    def rollout(self, trace_id, score):
        Ids.next_trace = trace_id
        with self._client.start_as_current_observation(name="agent", as_type="agent"):
            yield
            self._client.score_current_trace(name="reward", value=score)

    def end(self):
        self._client.flush()


class Traceloop:
    """traceloop's SDK; it has no scores, so the root span has the event of the GenAI conventions."""

    def __init__(self, url):
        from traceloop.sdk import Traceloop

        Traceloop.init("agent", api_endpoint=url, api_key="x", telemetry_enabled=False)
        trace.get_tracer_provider().id_generator = Ids()

    @contextlib.contextmanager
    def rollout(self, trace_id, score):
        Ids.next_trace = trace_id
        with trace.get_tracer("agent").start_as_current_span("agent") as span:
            yield
            if score is not None:
                result = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": score}
                span.add_event("gen_ai.evaluation.result", result)

    def end(self):
        trace.get_tracer_provider().force_flush()


class AtOnce:
    """All of them in one process, under `opentelemetry-instrument`; the score is given natively, and to Langfuse."""

    def __init__(self, url):
        self._all = [setup(url) for setup in (Native, Traceloop, Langfuse, OpenInference)]

    @contextlib.contextmanager
    def rollout(self, trace_id, score):
        with contextlib.ExitStack() as stack:
            for sdk in self._all:  # traceloop's spans are in our store, too, where rewards add up
                stack.enter_context(sdk.rollout(trace_id, None if isinstance(sdk, Traceloop) else score))
            yield

    def end(self):
        for sdk in self._all:
            sdk.end()


SETUPS = {
    "native": Native,
    "openinference": OpenInference,
    "phoenix": Phoenix,
    "langfuse": Langfuse,
    "traceloop": Traceloop,
    "at_once": AtOnce,
}


def client_class(sdk):
    """Langfuse instruments openai by a module in its place."""
    return importlib.import_module("langfuse.openai" if sdk in ("langfuse", "at_once") else "openai").OpenAI

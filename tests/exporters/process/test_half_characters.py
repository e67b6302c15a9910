"""Half characters (lone surrogates), which UTF-8 cannot hold, cost nothing: they are escaped wherever text leaves the process."""

from pathlib import Path

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan._process.encodable import encodable
from trainspan_schemas.telemetry import keys

PROGRAM = r"""
import http, httpx, os, trainspan
from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext, Status, StatusCode

tracer = trace.get_tracer("scope \udc81", "1\udc81")
with trainspan.rollout(task_id="task \udc80", rollout_id="r \ud83d", attempt=0) as r:
    link = Link(SpanContext(1, 1, True), {"k\udc82": "v\udc82"})
    with tracer.start_as_current_span("name \udc83", links=[link]) as span:
        span.set_attributes({"text": "a\udc84", "\udc85": 1, "list": ["x", "\udc86"], "long": 10**23, "whole": "whole 😀"})
        span.set_attribute("status", http.HTTPStatus.OK)
        span.add_event("event \udc87", {"k": "\udc88"})
        span.set_status(Status(StatusCode.ERROR, "why \udc89"))
    httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"model": "policy", "messages": []})
    trainspan.reward(1.0, explanation="because \udc8a")
    try:
        open("file \udc8b")
    except OSError as error:
        trace.get_current_span().record_exception(error)
    tracer.start_span("whole").end()
"""


def test_half_characters_in_names_attributes_and_ids_are_escaped_and_nothing_else_is_lost(
    tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    extra = {**wired, **WITHOUT_OPENAI, "OTEL_SERVICE_NAME": "agent \udc8c"}
    ran = run(write(tmp_path, PROGRAM), extra)
    assert ran.code == 0
    lines = ran.stderr.splitlines()
    assert [line.partition(";")[0].split()[-1] for line in lines] == ["event=half_characters", "event=integer_too_long"]
    span = recorder.one(r"name \udc83")
    rollout = next(span for span in recorder.named("trainspan.rollout") if keys.TASK_ID in span.attributes)
    ids = {keys.ROLLOUT_ID: r"r \ud83d", keys.TASK_ID: r"task \udc80", keys.ATTEMPT: 0, keys.SPLIT: "train"}
    assert span.attributes == {
        **ids,
        "text": r"a\udc84",
        r"\udc85": 1,
        "list": ["x", r"\udc86"],
        "long": "100000000000000000000000",
        "status": 200,
        "whole": "whole 😀",
    }
    assert span.events == [(r"event \udc87", {"k": r"\udc88"})]
    assert (span.error, span.service, len(span.links)) == (True, r"agent \udc8c", 1)
    assert rollout.attributes[keys.ROLLOUT_CALLS] == 1
    names = [name for name, _ in rollout.events]
    assert names == [keys.EVALUATION_EVENT, "exception"]
    assert rollout.events[0][1][keys.EVALUATION_EXPLANATION] == r"because \udc8a"
    assert r"file \udc8b" in rollout.events[1][1]["exception.message"]
    recorder.one("whole")
    (log,) = recorder.logs
    assert log.attributes[keys.EVALUATION_EXPLANATION] == r"because \udc8a"
    (request,) = policy.requests
    assert {name: request.baggage[name] for name in (keys.ROLLOUT_ID, keys.TASK_ID)} == {
        name: ids[name] for name in (keys.ROLLOUT_ID, keys.TASK_ID)
    }


def test_an_escaped_span_says_how_much_the_sdk_dropped_at_its_limits() -> None:
    limits = SpanLimits(max_attributes=2, max_events=1, max_links=1, max_event_attributes=1, max_link_attributes=1)
    memory = InMemorySpanExporter()
    provider = TracerProvider(span_limits=limits)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    three = {"a": 1, "b": "\udc80", "c": (3, "x")}
    context = SpanContext(1, 1, is_remote=True)
    span = provider.get_tracer("scope").start_span("x", links=[Link(context, three), Link(context, three)])
    span.set_attributes(three)
    for _ in range(3):
        span.add_event("e \udc80", three)
    span.end()
    (item,) = encodable(memory.get_finished_spans())
    (sent,) = encode_spans([item]).resource_spans[0].scope_spans[0].spans
    assert sent.events[0].name == r"e \udc80"
    assert (sent.dropped_attributes_count, sent.dropped_events_count, sent.dropped_links_count) == (1, 2, 1)
    assert [pair.key for pair in sent.attributes] == ["b", "c"]
    assert (sent.events[0].dropped_attributes_count, sent.links[0].dropped_attributes_count) == (2, 2)

"""Programs that set OpenTelemetry providers of their own under `opentelemetry-instrument`, as vendors' packages do."""

from pathlib import Path

from tests.support.agents.programs import WITHOUT_OPENAI, Ran, run, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_schemas.telemetry import keys

SETUP = """
import trainspan
from opentelemetry import _logs, metrics, trace
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

class OwnProvider(TracerProvider):
    __hash__ = None  # as logfire's, which is a dataclass

provider = OwnProvider(resource=Resource.create({"service.name": "of the program"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[1], insecure=True)))
logs = LoggerProvider()
logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(endpoint=sys.argv[1], insecure=True)))
meters = MeterProvider()
before = trace.get_tracer("before")
trace.set_tracer_provider(provider)
_logs.set_logger_provider(logs)
metrics.set_meter_provider(meters)
"""


def _run(tmp_path: Path, vendor: OtlpRecorder, wired: dict[str, str], source: str) -> Ran:
    return run(write(tmp_path, SETUP.replace("sys.argv[1]", repr(vendor.endpoint)) + source), wired)


def test_spans_and_rewards_of_a_provider_that_the_program_sets_reach_both_backends(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = """
with trace.get_tracer("agent").start_as_current_span("invoke_agent"):
    trainspan.reward(0.5)
    with trainspan.rollout(task_id="t") as r:
        trace.get_tracer("agent").start_span("step").end()
    with before.start_as_current_span("instrumented"):
        pass
assert metrics.get_meter_provider() is meters
trace.set_tracer_provider(TracerProvider())  # a second one is refused, as ever
assert trace.get_tracer_provider() is provider
"""
    with OtlpRecorder() as vendor:
        ran = _run(tmp_path, vendor, wired, source)
        vendor.wait_for(lambda seen: len(seen.spans) >= 3)
    assert (ran.code, ran.stderr) == (0, "Overriding of current TracerProvider is not allowed\n")
    here, there = ({span.name: span for span in seen.spans} for seen in (recorder, vendor))
    assert set(there) == {"invoke_agent", "step", "trainspan.rollout"}
    assert set(here) == {*there, "instrumented"}
    assert {span.trace_id for span in there.values()} <= {span.trace_id for span in here.values()}
    assert here["invoke_agent"].service == "of the program"
    assert here["step"].attributes[keys.TASK_ID] == "t"
    assert here["step"].attributes[keys.ROLLOUT_ID] != here["invoke_agent"].attributes[keys.ROLLOUT_ID]


def test_a_program_that_shuts_its_provider_down_keeps_its_rollout(
    tmp_path: Path, recorder: OtlpRecorder, wired: dict[str, str]
) -> None:
    source = """
with trace.get_tracer("agent").start_as_current_span("work"):
    pass
trace.get_tracer_provider().shutdown()
_logs.get_logger_provider().shutdown()
"""
    with OtlpRecorder() as vendor:
        ran = _run(tmp_path, vendor, wired, source)
        vendor.wait_for(lambda seen: len(seen.spans) >= 1)
    assert (ran.code, ran.stderr) == (0, "")
    assert [span.name for span in vendor.spans] == ["work"]
    assert {"work", "trainspan.rollout"} <= {span.name for span in recorder.spans}


SHUTS_DOWN = """
    import os, time
    import trainspan
    from opentelemetry import trace
    from opentelemetry._logs import get_logger_provider

    with trainspan.rollout(task_id="first") as first:
        trace.get_tracer_provider().shutdown()
        get_logger_provider().shutdown()
    first.reward(1.0)
    with trainspan.rollout(task_id="second") as second:
        second.reward(0.5)
"""


def test_a_program_that_shuts_its_providers_down_loses_nothing_that_comes_after(
    tmp_path: Path, recorder: OtlpRecorder
) -> None:
    """Two rollouts, one of which ends after the shutdown, and a reward after the end of each."""
    ran = run(write(tmp_path, SHUTS_DOWN), {**WITHOUT_OPENAI, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint})
    assert (ran.code, ran.stderr) == (0, "")
    ended = [span.attributes for span in recorder.named("trainspan.rollout")]
    assert [(of[keys.TASK_ID], of[keys.ROLLOUT_STATUS]) for of in ended if keys.TASK_ID in of] == [
        ("first", "ok"),
        ("second", "ok"),
    ]
    assert sorted(record.attributes[keys.EVALUATION_SCORE] for record in recorder.logs) == [0.5, 1.0]


def test_a_program_that_shuts_a_provider_of_its_own_down_is_told_which_rollout_that_loses(
    tmp_path: Path, recorder: OtlpRecorder
) -> None:
    source = """
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    trace.set_tracer_provider(TracerProvider())
    trace.get_tracer_provider().add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    """
    agent = write(tmp_path, source + SHUTS_DOWN.replace("get_logger_provider().shutdown()", "pass"))
    ran = run(agent, {"OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint}, instrument=False)
    assert ran.code == 0
    (line,) = [line for line in ran.stderr.splitlines() if "event=" in line]
    assert line.startswith("event=tracing_was_shut_down; ")
    assert "before the rollout of task 'first' ended" in line
    assert "force_flush()" in line

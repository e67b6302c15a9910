"""A process with many rollouts and several collectors, whatever the user's variables for OpenTelemetry's SDK say."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents.programs import WITHOUT_OPENAI, run, write
from tests.support.otlp.recorder import OtlpRecorder
from tests.support.ports import free_port
from trainspan_schemas.store.collectors import ENV_COLLECTORS, Collectors
from trainspan_schemas.telemetry import keys

COUNT = 16
AGENT = f"""
    import trainspan
    from opentelemetry import trace

    for number in range({COUNT}):
        with trainspan.rollout():
            with trace.get_tracer("agent").start_as_current_span("work"):
                pass
            trainspan.reward(1.0)
"""
OWN_EXPORTER = """
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    trace.get_tracer_provider().add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
"""


@pytest.fixture
def two() -> Iterator[tuple[OtlpRecorder, OtlpRecorder]]:
    with OtlpRecorder() as first, OtlpRecorder() as second:
        yield first, second


def variables(*collectors: str) -> dict[str, str]:
    return {
        **WITHOUT_OPENAI,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collectors[0],
        "OTEL_EXPORTER_OTLP_TIMEOUT": "30",
        ENV_COLLECTORS: ",".join(collectors),
    }


def rollouts_of(recorder: OtlpRecorder) -> tuple[list[str], list[str]]:
    """Rollout ids of the work spans and of the rewards."""
    spans = [str(span.attributes[keys.ROLLOUT_ID]) for span in recorder.named("work")]
    return sorted(spans), sorted(str(log.attributes[keys.ROLLOUT_ID]) for log in recorder.logs)


@pytest.mark.parametrize(
    "chosen",
    [
        {"OTEL_TRACES_EXPORTER": "console, otlp", "OTEL_LOGS_EXPORTER": "console, otlp"},
        {"OTEL_TRACES_EXPORTER": "otlp_proto_grpc", "OTEL_LOGS_EXPORTER": " otlp_proto_grpc"},
        {
            "OTEL_TRACES_EXPORTER": "otlp_proto_grpc",
            "OTEL_LOGS_EXPORTER": "otlp_proto_grpc",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        },
        {"OTEL_EXPORTER_OTLP_PROTOCOL": ""},
    ],
    ids=["with spaces", "entry point", "entry point before protocol", "default protocol"],
)
def test_spans_and_rewards_are_divided_however_grpc_is_chosen(
    tmp_path: Path, two: tuple[OtlpRecorder, OtlpRecorder], chosen: dict[str, str]
) -> None:
    urls = [recorder.endpoint for recorder in two]
    ran = run(write(tmp_path, AGENT), variables(*urls) | chosen)
    assert ran.code == 0, ran.stderr
    found = [rollouts_of(recorder) for recorder in two]
    assert [len(of_spans) for of_spans, _ in found] == [len(of_rewards) for _, of_rewards in found]
    assert sum(len(of_spans) for of_spans, _ in found) == COUNT
    for recorder, (of_spans, of_rewards) in zip(two, found, strict=True):
        assert of_spans == of_rewards
        assert {Collectors.of(urls).url_for(rollout_id) for rollout_id in of_spans} == {recorder.endpoint}


def test_a_signal_that_is_not_divided_goes_to_one_collector_as_a_whole(
    tmp_path: Path, two: tuple[OtlpRecorder, OtlpRecorder]
) -> None:
    first, second = two
    source = OWN_EXPORTER + AGENT
    ran = run(write(tmp_path, source), variables(first.endpoint, second.endpoint) | {"OTEL_TRACES_EXPORTER": "none"})
    assert (ran.code, ran.stderr) == (0, "")
    assert (len(first.named("work")), len(second.named("work"))) == (COUNT, 0)
    assert first.logs
    assert second.logs
    assert len(first.logs) + len(second.logs) == COUNT


def test_a_program_with_a_collector_of_its_own_sends_nothing_to_the_others(
    tmp_path: Path, recorder: OtlpRecorder, two: tuple[OtlpRecorder, OtlpRecorder]
) -> None:
    ours = variables(*(one.endpoint for one in two))
    ran = run(write(tmp_path, AGENT), {**ours, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint})
    assert ran.code == 0, ran.stderr
    assert [len(found) for found in rollouts_of(recorder)] == [COUNT, COUNT]
    assert [rollouts_of(one) for one in two] == [([], []), ([], [])]


def test_a_collector_in_upper_case_that_is_down_is_reported_like_any_other(
    tmp_path: Path, recorder: OtlpRecorder
) -> None:
    port = free_port()
    chosen = variables(recorder.endpoint, f"http://LocalHost:{port}")
    del chosen["OTEL_EXPORTER_OTLP_TIMEOUT"]
    ran = run(write(tmp_path, AGENT), chosen)
    assert ran.code == 0
    assert f"endpoint=localhost:{port};" in ran.stderr
    assert "event=telemetry_lost" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1

"""Texts that many rows inherit: a request may multiply them only so far, and batches are cut by what the rows hold."""

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector.process import event, span, span_id, trace_id, trace_request
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.otlp.gunzip import TooLargeError
from trainspan_collector.otlp.signals import LOGS, TRACES, OtlpSignal
from trainspan_collector.otlp.validation import Rejections
from trainspan_collector.receive.cutting import split_message
from trainspan_collector.rows.batch import Batch
from trainspan_collector.store.row_groups import BATCH_BYTES
from trainspan_schemas.telemetry import keys

MIB = 2**20


def _taken(signal: OtlpSignal, body: bytes) -> int:
    """The items of a request that can be stored, cut as the receiver cuts it. Raises TooLargeError."""
    rejections = Rejections(len(body))
    return sum(rejections.check(signal.parse(piece), piece)[0] for piece in split_message(signal, body, 200_000))


def _spans(n_spans: int, resource: str = "", scope: str = "") -> ExportTraceServiceRequest:
    spans = (span(5, number) for number in range(1, n_spans + 1))
    request = trace_request(*spans, resource={"text": resource} if resource else None)
    request.resource_spans[0].scope_spans[0].scope.name = scope
    return request


def _with_schema_urls() -> ExportTraceServiceRequest:
    request = _spans(300)
    request.resource_spans[0].schema_url = "x" * (MIB // 2)
    request.resource_spans[0].scope_spans[0].schema_url = "y" * (MIB // 2)
    return request


def _of_many_scopes() -> ExportTraceServiceRequest:
    request = _spans(1, resource="x" * MIB)
    for _ in range(300):
        request.resource_spans[0].scope_spans.add()
    return request


def _judged(n_events: int, n_feedback: int = 0) -> ExportTraceServiceRequest:
    feedback = {f"evaluations.{number}.evaluation.name": "reward" for number in range(n_feedback)}
    events = [event(keys.EVALUATION_EVENT, {}, time_ns=number) for number in range(n_events)]
    return trace_request(span(5, 1, {keys.ROLLOUT_ID: "r" * MIB, **feedback}, events=events))


@pytest.mark.parametrize(
    "request_",
    [
        _spans(2_000, scope="x" * 14 * MIB),
        _spans(300, resource="x" * MIB),
        _with_schema_urls(),
        _of_many_scopes(),
        _judged(300),
        _judged(200, n_feedback=64),
    ],
    ids=["scope", "resource", "schema URLs", "scopes", "evaluations", "feedback"],
)
def test_a_request_that_multiplies_a_text_is_too_large(request_: ExportTraceServiceRequest) -> None:
    with pytest.raises(TooLargeError, match="repeat more than"):
        _taken(TRACES, request_.SerializeToString())


def test_empty_log_records_that_multiply_their_resource_are_too_large() -> None:
    request = ExportLogsServiceRequest()
    scope_logs = request.resource_logs.add().scope_logs.add(scope=InstrumentationScope(name="x" * 30_000))
    for _ in range(15_000):
        scope_logs.log_records.add()
    body = request.SerializeToString()
    assert len(body) < 64 * 1024
    with pytest.raises(TooLargeError, match="repeat more than"):
        _taken(LOGS, body)


@pytest.mark.parametrize(
    "request_",
    [_spans(30_000, resource="x" * 8_000), _spans(15, scope="x" * 15 * MIB), _judged(200)],
    ids=["tiny spans", "long scope", "evaluations"],
)
def test_ordinary_resources_and_single_long_texts_are_taken(request_: ExportTraceServiceRequest) -> None:
    body = request_.SerializeToString()
    assert _taken(TRACES, body) == len(request_.resource_spans[0].scope_spans[0].spans)


def test_a_request_may_always_repeat_four_times_its_own_size() -> None:
    request = _spans(300, resource="x" * MIB)
    assert Rejections(76 * MIB).check(request, request.SerializeToString())[0] == 300


def _batch(request: ExportTraceServiceRequest | ExportLogsServiceRequest) -> Batch:
    signal = Signal.LOGS if isinstance(request, ExportLogsServiceRequest) else Signal.TRACES
    batch = Batch(0)
    batch.add(Frame(signal, 5, request.SerializeToString(), 0))
    return batch


def test_each_part_of_a_batch_holds_no_more_than_a_batch_may() -> None:
    events = [event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: f"{number}"}) for number in range(20)]
    logs = ExportLogsServiceRequest()
    scope_logs = logs.resource_logs.add().scope_logs.add(scope=InstrumentationScope(name="s"))
    for number in range(20):
        scope_logs.log_records.add(event_name="x" * 3 * MIB, time_unix_nano=number)
    for request, n_rows in (
        (_spans(20, scope="x" * 3 * MIB), 20),
        (
            trace_request(*_spans(20).resource_spans[0].scope_spans[0].spans, resource={"service.name": "x" * 3 * MIB}),
            20,
        ),
        (trace_request(span(5, 1, {keys.ROLLOUT_ID: "r" * 3 * MIB}, events=events)), 21),
        (logs, 20),
    ):
        left: Batch | None = _batch(request)
        counts = []
        while left is not None:
            rest = left.split(2048, BATCH_BYTES)
            tables = left.tables()
            held = [table for table in (tables.spans, tables.logs, tables.evaluations) if table is not None]
            assert sum(table.nbytes for table in held) < 2 * BATCH_BYTES
            counts.append(left.n_rows)
            left = rest
        assert sum(counts) == n_rows


@pytest.mark.parametrize(("trace_bytes", "span_bytes"), [(MIB, 8), (16, MIB), (15, 8), (16, 7)])
def test_feedback_and_events_belong_to_linked_spans_only_by_valid_ids(trace_bytes: int, span_bytes: int) -> None:
    said = {"evaluations.0.evaluation.name": "reward", "openinference.span.kind": "EVALUATOR"}
    link = Span.Link(trace_id=b"t" * trace_bytes, span_id=b"s" * span_bytes)
    events = [event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "helpful"})]
    rows = _batch(trace_request(span(5, 1, said, events=events, links=[link]))).evaluations
    assert {(row.name, row.trace_id, row.span_id) for row in rows} == {
        (name, trace_id(5).hex(), span_id(1).hex()) for name in ("reward", "helpful")
    }


def test_items_that_are_too_large_are_named_whether_spans_or_log_records() -> None:
    logs = ExportLogsServiceRequest()
    scope_logs = logs.resource_logs.add().scope_logs.add()
    scope_logs.log_records.add(event_name="large event", trace_id=trace_id(7)).body.string_value = "x" * 17 * MIB
    spans = trace_request(span(7, 1, {"text": "x" * 17 * MIB}))
    for request, said in ((logs, f"'large event' ({trace_id(7).hex()}/): has"), (spans, f"({trace_id(7).hex()}/")):
        body = request.SerializeToString()
        rejections = Rejections(len(body))
        assert rejections.check(request, body)[0] == 0
        assert rejections.message.startswith("1 rejected: ")
        assert said in rejections.message

"""Any request that protobuf can decode becomes rows: no sender can stop the loader."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.collector.process import (
    Attribute,
    any_value,
    event,
    key_values,
    span,
    span_id,
    trace_id,
    trace_request,
)
from trainspan_collector.journal.frames import Frame, Signal
from trainspan_collector.journal.trust import Sender
from trainspan_collector.rows.batch import Batch
from trainspan_collector.rows.tables import arrow_table
from trainspan_schemas.telemetry import keys

OUR_KEYS = sorted(
    value for name, value in vars(keys).items() if name.isupper() and isinstance(value, str) and "." in value
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, 2**31, -(2**31) - 1, 2**40])
scalars = st.none() | st.booleans() | numbers | st.floats() | texts | st.binary(max_size=9) | numbers.map(str)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
).map(any_value)
pairs = st.lists(
    st.builds(lambda key, value: KeyValue(key=key, value=value), st.sampled_from(OUR_KEYS) | texts, values), max_size=6
)
unsigned = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**32 - 1)
events = st.builds(
    Span.Event,
    name=st.just(keys.EVALUATION_EVENT) | texts,
    time_unix_nano=unsigned,
    attributes=pairs,
    dropped_attributes_count=counts,
)
links = st.builds(
    Span.Link, trace_id=st.binary(max_size=20), span_id=st.binary(max_size=10), attributes=pairs, flags=counts
)
spans = st.builds(
    Span,
    trace_id=st.integers(1, 3).map(trace_id) | st.binary(max_size=17),
    span_id=st.integers(1, 3).map(span_id) | st.binary(max_size=9),
    parent_span_id=st.binary(max_size=9),
    name=texts,
    kind=st.integers(-(2**31), 2**31 - 1),
    start_time_unix_nano=unsigned,
    end_time_unix_nano=unsigned,
    attributes=pairs,
    events=st.lists(events, max_size=3),
    links=st.lists(links, max_size=2),
    flags=counts,
    trace_state=texts,
    dropped_attributes_count=counts,
    status=st.builds(Status, code=st.integers(-5, 5), message=texts),
)
records = st.builds(
    LogRecord,
    trace_id=st.binary(max_size=17),
    span_id=st.binary(max_size=9),
    event_name=st.just(keys.EVALUATION_EVENT) | texts,
    time_unix_nano=unsigned,
    observed_time_unix_nano=unsigned,
    severity_number=st.integers(-(2**31), 2**31 - 1),
    body=values | st.just(AnyValue()),
    attributes=pairs,
    flags=counts,
)


@given(st.lists(spans, max_size=4), st.lists(records, max_size=3))
def test_every_decodable_request_becomes_rows_with_growing_numbers(
    some_spans: list[Span], some_records: list[LogRecord]
) -> None:
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.extend(some_records)
    batch = Batch(last_seq=10)
    batch.add(Frame(Signal.TRACES, 5, trace_request(*some_spans).SerializeToString(), 0))
    batch.add(Frame(Signal.LOGS, 5, logs.SerializeToString(), 0))
    valid = {
        (item.trace_id, item.span_id)
        for item in some_spans
        if len(item.trace_id) == 16 and len(item.span_id) == 8 and any(item.trace_id) and any(item.span_id)
    }
    assert {(bytes.fromhex(row.trace_id), bytes.fromhex(row.span_id)) for row in batch.spans} == valid
    assert sum(not row.collides for row in batch.spans) == len(valid), "one of each id, and distinct spans with its id"
    rows = [*batch.spans, *batch.logs, *batch.evaluations]
    assert len({row.seq for row in rows}) == len(rows)
    assert all(10 < row.seq <= batch.last_seq for row in rows)
    for some in (batch.spans, batch.logs, batch.evaluations):
        if some:
            table = arrow_table(some)
            table.validate(full=True)
            assert table.num_rows == len(some)


@pytest.mark.parametrize("agent_is_first", [True, False])
def test_an_agent_cannot_replace_a_trusted_evaluation_by_an_event_on_its_span(*, agent_is_first: bool) -> None:
    def said(score: float) -> dict[str, Attribute]:
        return {keys.EVALUATION_ID: "e", keys.EVALUATION_NAME: keys.REWARD, keys.EVALUATION_SCORE: score}

    logs = ExportLogsServiceRequest()
    record = LogRecord(trace_id=trace_id(1), event_name=keys.EVALUATION_EVENT, attributes=key_values(said(0.0)))
    logs.resource_logs.add().scope_logs.add().log_records.append(record)
    of_agent = trace_request(span(1, 1, events=[event(keys.EVALUATION_EVENT, said(1.0))]))
    frames = [
        Frame(Signal.TRACES, 5, of_agent.SerializeToString(), 0, Sender.AGENT),
        Frame(Signal.LOGS, 5, logs.SerializeToString(), 0, Sender.RUNNER),
    ]
    batch = Batch(last_seq=0)
    for frame in frames if agent_is_first else reversed(frames):
        batch.add(frame)
    assert [(row.score, row.untrusted) for row in batch.evaluations] == [(0.0, False)]


@pytest.mark.parametrize(("targets", "expected"), [([], (1, "of-judge", 2)), ([7], (7, None, None))])
def test_an_evaluators_event_is_of_the_span_it_links_to_and_not_of_the_evaluators_rollout(
    targets: list[int], expected: tuple[int, str | None, int | None]
) -> None:
    evaluator = span(
        1,
        1,
        {keys.GEN_AI_OPERATION: "evaluation", keys.ROLLOUT_ID: "of-judge", keys.ATTEMPT: 2},
        events=[event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: keys.REWARD, keys.EVALUATION_SCORE: 1.0})],
        links=[Span.Link(trace_id=trace_id(target), span_id=span_id(target)) for target in targets],
    )
    batch = Batch(last_seq=0)
    batch.add(Frame(Signal.TRACES, 5, trace_request(evaluator).SerializeToString(), 0))
    (row,) = batch.evaluations
    number, rollout_id, attempt = expected
    assert (row.trace_id, row.span_id) == (trace_id(number).hex(), span_id(number).hex())
    assert (row.rollout_id, row.attempt) == (rollout_id, attempt)

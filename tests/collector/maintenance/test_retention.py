"""Retention under a clock that is wrong: nothing that has just arrived is deleted."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.support.collector.filling import Store
from tests.support.collector.process import span, trace_id
from trainspan_collector.journal.frames import Signal
from trainspan_collector.maintenance.retention import Retention

DAY_NS = 86_400 * 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path)) as opened:
        yield opened


@pytest.mark.parametrize(("days_ahead_at_start", "days_ahead_later"), [(40, 0), (0, 40), (0, 0)])
def test_a_clock_that_was_ahead_and_is_set_back_or_is_set_forward_makes_nothing_old(
    store: Store, monkeypatch: pytest.MonkeyPatch, days_ahead_at_start: int, days_ahead_later: int
) -> None:
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + days_ahead_at_start * DAY_NS)
    retention = Retention(30, store.filling.index)
    store.filling.add_spans([span(1, 1)], received_ns=now_ns)
    store.filling.add_spans([span(2, 1)], received_ns=now_ns - 31 * DAY_NS)
    store.filling.index.cover(store.filling.cursor)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + days_ahead_later * DAY_NS)
    assert retention.apply(store.filling.cursor) == 1
    assert store.filling.cursor.execute("SELECT trace_id[-1:] FROM spans").fetchall() == [("1",)]


@pytest.mark.parametrize("late", ["span", "log record"])
def test_a_trace_is_as_young_as_its_newest_row_of_any_kind(store: Store, late: str) -> None:
    now_ns = time.time_ns()
    store.filling.add_spans([span(1, 1), span(2, 1)], received_ns=now_ns - 31 * DAY_NS)
    if late == "span":
        store.filling.add_spans([span(1, 2)], received_ns=now_ns)
    else:
        request = ExportLogsServiceRequest()
        request.resource_logs.add().scope_logs.add().log_records.append(LogRecord(trace_id=trace_id(1)))
        store.filling.add(Signal.LOGS, request.SerializeToString(), received_ns=now_ns)
    assert store.filling.expire(30) == 1
    left = store.filling.cursor.execute("SELECT DISTINCT trace_id[-1:] FROM spans").fetchall()
    assert left == [("1",)]

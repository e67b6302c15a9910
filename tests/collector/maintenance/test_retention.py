"""Retention under a clock that is wrong: nothing that has just arrived is deleted."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.collector.filling import Store
from tests.support.collector.process import span
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

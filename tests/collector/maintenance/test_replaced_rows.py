"""Rows that richer copies replaced are deleted once there are many, and not at once."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.collector.filling import Store
from tests.support.collector.process import span
from trainspan_collector.maintenance import replaced_rows
from trainspan_collector.maintenance.replaced_rows import ReplacedRows

HOUR_S = 3600


class Clock:
    """The clock of the chore."""

    def __init__(self) -> None:
        self.s = 0.0

    def monotonic(self) -> float:
        return self.s


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path)) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replaced_rows, "time", clock)
    return clock


def _send(store: Store, n_spans: int, size: int) -> None:
    store.filling.add_spans([span(1, number, {"text": size * "x"}) for number in range(1, n_spans + 1)])


def _counts(store: Store) -> tuple[int, ...]:
    """Spans, rows of spans, and replaced ones."""
    query = "SELECT (SELECT count(*) FROM spans), (SELECT count(*) FROM stored.spans), count(*) FROM stored.superseded"
    [counts] = store.filling.cursor.execute(query).fetchall()
    return counts


def test_what_was_replaced_an_hour_ago_is_deleted_once_it_is_much(store: Store, clock: Clock) -> None:
    chore = ReplacedRows(least=20)
    _send(store, 20, 1)
    _send(store, 12, 2)
    assert chore.apply(store.filling.cursor) == 0
    clock.s = HOUR_S
    assert chore.apply(store.filling.cursor) == 0  # 12 are not many
    _send(store, 12, 3)
    assert chore.apply(store.filling.cursor) == 12  # the others were replaced just now
    assert _counts(store) == (20, 32, 12)
    clock.s = 2 * HOUR_S
    assert chore.apply(store.filling.cursor) == 0
    _send(store, 20, 4)
    assert chore.apply(store.filling.cursor) == 12
    assert _counts(store) == (20, 40, 20)
    assert store.differences() == (0, 0)
    _send(store, 20, 4)
    assert _counts(store) == (20, 40, 20)


def test_much_is_deleted_in_parts(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_rows, "_AT_ONCE", 10)
    chore = ReplacedRows(kept_s=0, least=5)
    _send(store, 15, 1)
    _send(store, 15, 2)
    assert chore.apply(store.filling.cursor) == 10
    assert chore.is_due()
    assert chore.apply(store.filling.cursor) == 5
    assert not chore.is_due()
    assert _counts(store) == (15, 15, 0)

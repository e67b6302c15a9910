"""The table of places: readers of some rollouts look only where the rows of these rollouts and of their traces are."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import duckdb
import pytest

from tests.collector.query.test_scoped_views import tangle
from tests.support.collector.filling import Store
from tests.support.collector.process import span
from trainspan_collector.query import places
from trainspan_collector.query.places import NOWHERE, RowPlaces
from trainspan_collector.store import insert
from trainspan_collector.store.insert import lacking_places
from trainspan_schemas.telemetry import keys

ROWS = """(
    SELECT seq, trace_id, rollout_id FROM stored.spans UNION ALL SELECT seq, trace_id, rollout_id FROM stored.logs
    UNION ALL SELECT seq, trace_id, rollout_id FROM stored.evaluations
)"""


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (insert, places):
        monkeypatch.setattr(module, "PLACE_ROWS", 16)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


def _ranges_of(cursor: duckdb.DuckDBPyConnection, rollout_id: str) -> tuple[int, int]:
    """Asserts that no row of the rollout is missed; the numbers of rows looked at and of all."""
    within = RowPlaces(cursor).of_rollouts([rollout_id])
    own = f"SELECT trace_id FROM {ROWS} WHERE rollout_id = '{rollout_id}' AND trace_id IS NOT NULL"
    missed = f"(trace_id IN ({own}) OR rollout_id = '{rollout_id}') AND NOT {within}"
    assert cursor.execute(f"SELECT count(*) FROM {ROWS} WHERE {missed}").fetchall() == [(0,)]
    [(seen, total)] = cursor.execute(f"SELECT count(*) FILTER ({within}), count(*) FROM {ROWS}").fetchall()
    return seen, total


def _check(store: Store) -> None:
    cursor = store.database.cursor()
    assert cursor.execute(lacking_places()).fetchall() == [(0,)]
    [(last,)] = cursor.execute("SELECT max(place) FROM stored.places").fetchall()
    assert last == (store.database.progress().last_seq + 1) // 16 - 1
    ids = [
        name for (name,) in cursor.execute(f"SELECT DISTINCT rollout_id FROM {ROWS} WHERE rollout_id <> ''").fetchall()
    ]
    found = [_ranges_of(cursor, rollout_id) for rollout_id in [*ids, "nobody"]]
    assert len(ids) > 10
    assert found[-1][0] < 16  # only what came after the last place
    assert min(seen for seen, _ in found[:-1]) < 0.8 * found[0][1]


@pytest.mark.ci
def test_no_row_of_a_rollout_is_missed_after_loads_compaction_and_a_restart(store: Store) -> None:
    for seed in range(3):
        tangle(Random(seed), store.filling)
    _check(store)
    store.compact()
    tangle(Random(4), store.filling)
    _check(store)
    store.close()
    store.open()
    tangle(Random(5), store.filling)
    _check(store)


def test_places_without_rows_are_dropped_with_expired_traces(store: Store) -> None:
    day = 86_400 * 10**9
    for number in range(60):
        said = {keys.ROLLOUT_ID: f"r{number}"}
        store.filling.add_spans([span(1 + number, 1, said)], received_ns=day if number < 40 else 2**62)
    assert store.filling.expire() == 40
    cursor = store.database.cursor()
    assert cursor.execute("SELECT DISTINCT place FROM stored.places").fetchall() == [(2,)]
    assert cursor.execute(lacking_places()).fetchall() == [(0,)]


def test_spans_without_a_rollout_are_searched_only_in_places_that_have_some(store: Store) -> None:
    spans = [span(1 + number, 1, {keys.ROLLOUT_ID: "r"}) for number in range(70)]
    store.filling.add_spans(spans)
    assert RowPlaces(store.database.cursor()).without_rollout() == NOWHERE
    store.filling.add_spans([span(100, 1)])
    within = RowPlaces(store.database.cursor()).without_rollout()
    assert within == f"(seq BETWEEN 64 AND {2**63 - 1})"
    store.filling.add_spans([span(200 + number, 1, {keys.ROLLOUT_ID: "r"}) for number in range(40)])
    within = RowPlaces(store.database.cursor()).without_rollout()
    assert within == f"(seq BETWEEN 64 AND 79 OR seq BETWEEN 112 AND {2**63 - 1})"

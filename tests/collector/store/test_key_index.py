"""The key index finds duplicates whatever happened to it, at a cost independent of the store's size."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.collector.maintenance.test_maintenance import _store
from tests.support.collector import (
    CollectorProcess,
    any_value,
    event,
    export,
    export_logs,
    key_values,
    running,
    select,
    span,
    trace_id,
)
from tests.support.filling import Filling
from trainspan_collector.journal.frames import Signal
from trainspan_collector.store.database import Database
from trainspan_collector.store.key_index import KeyIndex, KeyIndexError
from trainspan_schemas import keys

MEMORY_BYTES = 2**28
REWARD = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0}


class Store:
    """A store's files, which can be opened and closed repeatedly."""

    def __init__(self, folder: Path) -> None:
        self.path, self.keys = folder / "spans.duckdb", folder / "spans.duckdb.keys"
        self.open()

    def open(self) -> None:
        self.database = Database(self.path, memory_bytes=MEMORY_BYTES)
        self.filling = Filling(self.database, self.keys)

    def close(self) -> None:
        self.filling.close()
        self.database.close()

    def send(self, text: str = "", trace: int = 1) -> int:
        """Sends ten spans with an evaluation each and ten log records; returns the number of duplicates."""
        spans = [
            span(trace, number, {"text": text}, events=[event(keys.EVALUATION_EVENT, REWARD)])
            for number in range(1, 11)
        ]
        request = ExportLogsServiceRequest()
        request.resource_logs.add().scope_logs.add().log_records.extend(
            LogRecord(trace_id=trace_id(trace), time_unix_nano=number, body=any_value("text"))
            for number in range(1, 11)
        )
        return self.filling.add_spans(spans) + self.filling.add(Signal.LOGS, request.SerializeToString())

    def counts(self) -> tuple[int, ...]:
        """Numbers of spans, evaluations and log records: distinct, and in total."""
        query = """
SELECT count(DISTINCT (trace_id, span_id)), count(*) FROM spans
UNION ALL SELECT count(DISTINCT key), count(*) FROM stored.live_evaluations
UNION ALL SELECT count(DISTINCT content_hash), count(*) FROM stored.logs
"""
        return tuple(count for row in self.filling.cursor.execute(query).fetchall() for count in row)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path)) as opened:
        yield opened


def _nothing(store: Store) -> None:
    """Only a restart of the collector."""


def _remove(store: Store) -> None:
    shutil.rmtree(store.keys)


def _overwrite(store: Store) -> None:
    for path in store.keys.iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)


def _remove_half(store: Store) -> None:
    for path in sorted(store.keys.iterdir())[::2]:
        path.unlink()


@pytest.mark.parametrize("happens", [_nothing, _remove, _overwrite, _remove_half])
def test_what_is_sent_again_is_found_after_anything_that_happens_to_the_index(
    store: Store, happens: Callable[[Store], None]
) -> None:
    assert store.send() == 0
    store.close()
    happens(store)
    store.open()
    assert store.send() == 30
    assert store.send("richer") == 30
    assert store.send("richer") == 30
    assert store.send(trace=2) == 0
    assert store.counts() == (20,) * 6


def test_an_index_that_is_behind_is_extended(store: Store) -> None:
    """As after a kill between a commit and its record in the index, and after a failure to write that record."""
    store.send()
    store.close()
    shutil.copytree(store.keys, before := store.keys.with_name("before"))
    store.open()
    assert store.send(trace=2) == 0
    assert store.send("richer") == 30
    store.close()
    shutil.rmtree(store.keys)
    before.rename(store.keys)
    store.open()
    assert [store.send(trace=2), store.send("richer"), store.send()] == [30, 30, 30]
    assert store.counts() == (20,) * 6


def test_a_store_that_lost_its_newest_rows_gets_a_new_index(store: Store) -> None:
    """As after a damaged write-ahead log: numbers are reused for other rows."""
    store.send()
    store.close()
    shutil.copy(store.path, before := store.path.with_name("before"))
    store.open()
    store.send("richer")
    store.close()
    before.rename(store.path)
    store.open()
    assert store.send() == 30
    assert store.send("richer") == 30
    assert store.counts() == (10,) * 6


def test_the_index_of_another_store_is_not_believed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with closing(Store(tmp_path / "other")) as other:
        other.send(trace=3)
        other.send(trace=4)
    store.send()
    store.send(trace=2)
    store.close()
    shutil.rmtree(store.keys)
    other.keys.rename(store.keys)
    store.open()
    assert [store.send(), store.send(trace=2), store.send(trace=3)] == [30, 30, 0]


def test_rows_that_are_gone_from_the_store_are_new_when_they_come_again(store: Store) -> None:
    store.send()
    for table in ("spans", "evaluations", "logs"):
        store.filling.cursor.execute(f"DELETE FROM stored.{table}")
    assert store.send() == 0
    assert store.counts() == (10,) * 6


def test_verify_counts_the_rows_that_the_index_lacks(store: Store) -> None:
    store.send()
    store.filling.add_many(3_000)  # the newest 2,048 are looked up when it is opened
    store.send(trace=2)
    index = store.filling.index
    assert index._db is not None
    for key in index.hashes(store.filling.cursor, "spans", "(FROM stored.spans WHERE seq <= 3)"):
        index._db.delete(key)
    index.add([], [], store.filling.last_seq)
    store.close()
    problems = _store(store.path, "verify", code=1)["problems"]  # file modes too: this is not a collector's process
    assert "2 rows missing in the key index" in problems
    store.open()


def test_a_failure_of_the_index_is_an_error_once_and_then_it_is_opened_again(store: Store) -> None:
    store.send()
    assert store.filling.index._db is not None
    store.filling.index._db.close()  # raises from now on
    with pytest.raises(KeyIndexError):
        store.send()
    store.filling.cursor.execute("ROLLBACK")
    assert store.send() == 30


def test_a_damaged_block_that_is_read_later_makes_the_index_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.filling.add_many(10_000)
    store.send()
    store.close()
    for path in store.keys.glob("*.sst"):
        data = path.read_bytes()
        path.write_bytes(bytes(len(data) // 3) + data[len(data) // 3 :])  # keeps what is read first: "covered", "salt"
    monkeypatch.setattr(KeyIndex, "_belongs_to", lambda *_: True)
    store.open()
    for _ in range(2):
        with pytest.raises(KeyIndexError):
            store.send()
        store.filling.cursor.execute("ROLLBACK")
    assert store.send() == 30
    assert store.counts() == (10_010, 10_010, 10, 10, 10, 10)


def test_many_duplicates_from_all_over_the_store_are_found(store: Store) -> None:
    store.filling.add_many(300_000)
    query = "SELECT trace_id, span_id FROM stored.spans WHERE seq % 150 = 0"
    rows = store.filling.cursor.execute(query).fetchall()
    again = [span(int(trace, 16), int(number, 16)) for trace, number in rows]
    assert store.filling.add_spans(again) == len(again) == 2_000
    [(n_spans,)] = store.filling.cursor.execute("SELECT count(*) FROM stored.spans").fetchall()
    assert n_spans == 300_000


def test_a_look_for_duplicates_reads_few_rows_of_100_thousand(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.filling.add_many(100_000)
    rows = store.filling.cursor.execute("SELECT trace_id, span_id FROM stored.spans WHERE seq % 25_000 = 0").fetchall()
    watched = _Watched(store.filling.cursor)
    monkeypatch.setattr(store.filling, "cursor", watched)
    assert store.filling.add_spans([span(2, number) for number in range(1, 1_001)]) == 0
    assert watched.n_scanned == []
    assert store.filling.add_spans([span(int(trace, 16), int(number, 16)) for trace, number in rows]) == 4
    [n_scanned] = watched.n_scanned
    assert 4 <= n_scanned <= 5 * 2_048 + 1_000  # a row group per duplicate, and the newest rows


class _Watched:
    """A cursor that records how many table rows each duplicate check scanned."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self.n_scanned: list[int] = []

    def execute(self, sql: str, *parameters: Any) -> Any:
        if "FROM stored.spans" in sql or "FROM stored.live_spans" in sql:
            [(_, plan)] = self._cursor.execute(f"EXPLAIN (ANALYZE, FORMAT json) {sql}", *parameters).fetchall()
            self.n_scanned.append(sum(map(_rows_scanned, json.loads(plan)["operator"])))
        return self._cursor.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def _rows_scanned(node: Mapping[str, Any]) -> int:
    scanned: int = node.get("rows_scanned", 0)
    return scanned + sum(map(_rows_scanned, node.get("children", [])))


def test_a_compaction_and_a_purge_leave_a_store_whose_duplicates_are_found(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", load_interval_s=0.05) as collector:
        for trace in (1, 2, 3):
            _export(collector, trace)
        _store(collector.store, "compact")
        _export(collector, 2)
        _store(collector.store, "purge", "--trace", trace_id(1).hex(), "--yes")
        for trace in (1, 3):
            _export(collector, trace)
        names = "spans", "logs", "evaluations"
        assert [select(collector.address, f"SELECT count(*) FROM {name}") for name in names] == [[(9,)]] * 3
        assert _store(collector.store, "verify")["ok"] is True


def _export(collector: CollectorProcess, trace: int) -> None:
    reward = event(keys.EVALUATION_EVENT, REWARD)
    export(collector.address, *(span(trace, number, events=[reward]) for number in (1, 2, 3)))
    export_logs(
        collector.address,
        *(
            LogRecord(trace_id=trace_id(trace), time_unix_nano=number, attributes=key_values({}))
            for number in (1, 2, 3)
        ),
    )

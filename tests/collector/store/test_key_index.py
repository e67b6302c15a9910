"""The key index finds duplicates whatever happened to it, at a cost independent of the store's size."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from rocksdict import Rdict

from tests.collector.maintenance.test_maintenance import _store
from tests.support.collector.filling import Store
from tests.support.collector.process import (
    Attribute,
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
from trainspan_collector.journal.frames import Signal
from trainspan_collector.store.insert import add_places
from trainspan_collector.store.key_index import Copy, KeyIndex, KeyIndexError, _options
from trainspan_schemas.telemetry import keys

REWARD = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0}


class Sent(Store):
    """A store into which the same rows are sent again and again."""

    def send(self, text: str = "", trace: int = 1, received_ns: int = 1) -> int:
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
        n_duplicates = self.filling.add_spans(spans, received_ns=received_ns)
        return n_duplicates + self.filling.add(Signal.LOGS, request.SerializeToString(), received_ns=received_ns)

    def counts(self) -> tuple[int, ...]:
        """Numbers of spans, evaluations and log records: distinct, and in total."""
        query = """
SELECT count(DISTINCT (trace_id, span_id)), count(*) FROM spans
UNION ALL SELECT count(DISTINCT key), count(*) FROM stored.live_evaluations
UNION ALL SELECT count(DISTINCT content_hash), count(*) FROM stored.logs
"""
        return tuple(count for row in self.filling.cursor.execute(query).fetchall() for count in row)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Sent]:
    with closing(Sent(tmp_path)) as opened:
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


def _tear(store: Store) -> None:
    """The files of a file system that lost its last writes."""
    for path in store.keys.iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _write_the_earlier_format(store: Store) -> None:
    """An index of `seq` alone, of the same keys."""
    with closing(Rdict(str(store.keys), _options())) as index:
        header = json.loads(index[b"header"])
        for key, value in index.items():
            if key != b"header":
                index[key] = value[:8]
        del index[b"header"]
        index[b"salt"], index[b"covered"] = bytes.fromhex(header["salt"]), header["covered"].to_bytes(8, "little")


DAMAGES = (_remove, _overwrite, _remove_half, _tear, _write_the_earlier_format)


@pytest.mark.parametrize("happens", [_nothing, *DAMAGES])
def test_what_is_sent_again_is_found_after_anything_that_happens_to_the_index(
    store: Sent, happens: Callable[[Sent], None]
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


def test_an_index_that_is_behind_is_extended(store: Sent) -> None:
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


def test_a_store_that_lost_its_newest_rows_gets_a_new_index(store: Sent) -> None:
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


def test_numbers_that_a_broken_off_extension_took_from_rows_that_were_lost_are_not_believed(
    store: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.send()
    store.close()
    shutil.copy(store.path, before := store.path.with_name("before"))
    store.open()
    monkeypatch.setattr(KeyIndex, "add", lambda *_: None)
    store.send(trace=2)
    monkeypatch.setattr(KeyIndex, "_write", _failing_after(2))  # how far it will come, and the first rows
    with pytest.raises(KeyIndexError):
        store.filling.index.cover(store.filling.cursor)
    monkeypatch.undo()
    store.close()
    before.rename(store.path)
    store.open()
    assert [store.send(trace=3), store.send(trace=2)] == [0, 0]
    assert store.counts() == (30,) * 6


def _failing_after(n_writes: int) -> Callable[..., None]:
    write, left = KeyIndex._write, iter(range(n_writes))

    def write_or_fail(*arguments: Any, **more: Any) -> None:
        if next(left, None) is None:
            raise RuntimeError("planted")
        write(*arguments, **more)

    return write_or_fail


def test_the_index_of_another_store_is_not_believed(store: Sent, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with closing(Sent(tmp_path / "other")) as other:
        other.send(trace=3)
        other.send(trace=4)
    store.send()
    store.send(trace=2)
    store.close()
    shutil.rmtree(store.keys)
    other.keys.rename(store.keys)
    store.open()
    assert [store.send(), store.send(trace=2), store.send(trace=3)] == [30, 30, 0]


def test_the_index_of_a_copy_that_went_its_own_way_is_not_believed(store: Sent, tmp_path: Path) -> None:
    store.send()
    store.database.checkpoint()
    store.close()
    (tmp_path / "other").mkdir()
    shutil.copy(store.path, tmp_path / "other")
    with closing(Sent(tmp_path / "other")) as other:
        other.send(trace=3)
    store.open()
    store.send(trace=2)
    store.close()
    shutil.rmtree(store.keys)
    other.keys.rename(store.keys)
    store.open()
    assert [store.send(), store.send(trace=2), store.send(trace=3)] == [30, 30, 0]


def test_an_index_of_another_format_is_rebuilt(store: Sent) -> None:
    store.send()
    index = store.filling.index
    index._write({}, replace(index._header, format=index._header.format + 1))
    salt = index._header.salt
    store.close()
    store.open()
    assert store.send() == 30
    assert store.filling.index._header.salt != salt


def test_rows_that_retention_deleted_are_new_when_they_come_again(store: Sent) -> None:
    store.send()
    store.send("richer")
    store.send(trace=2, received_ns=time.time_ns())
    assert store.filling.expire() == 40  # with the ten spans that were replaced
    assert store.differences() == (0, 0)
    assert store.send(trace=2) == 30
    assert store.send() == 0
    assert store.counts() == (20,) * 6


@pytest.mark.parametrize("fails", ["_write", "close"])
def test_an_index_that_cannot_forget_what_retention_deleted_is_rebuilt(
    store: Sent, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.send()
    store.send(trace=2, received_ns=time.time_ns())
    store.filling.index.cover(store.filling.cursor)
    if fails == "_write":
        monkeypatch.setattr(store.filling.index, "_write", _fail)
    else:
        assert store.filling.index._db is not None
        store.filling.index._db.close()
    assert store.filling.expire() == 30
    monkeypatch.undo()
    assert store.send() == 0
    assert store.send(trace=2) == 30
    assert store.differences() == (0, 0)


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("planted")


def test_a_deletion_that_is_rolled_back_leaves_the_index_as_it_was(store: Sent) -> None:
    store.send()
    cursor = store.filling.cursor
    salt = store.filling.index._header.salt
    with contextlib.suppress(ZeroDivisionError), store.filling.index.deleting(cursor, "true", {}):
        cursor.execute("DELETE FROM stored.spans")
        raise ZeroDivisionError
    cursor.execute("ROLLBACK")
    assert store.send() == 30
    assert store.filling.index._header.salt == salt  # it was not made anew
    assert store.filling.expire() == 30


def test_verify_counts_what_the_index_lacks_and_what_it_should_not_have(store: Sent) -> None:
    store.send()
    store.filling.add_many(3_000)  # the newest 2,048 are looked up when it is opened
    store.send(trace=2)
    index = store.filling.index
    assert index._db is not None
    stored = store.filling.cursor.sql("FROM stored.spans WHERE seq <= 3").to_arrow_table()
    for key, _ in index.copies(store.filling.cursor, "spans", stored):
        index._db.delete(key)
    index.add({bytes(16): Copy(4, 0)}, store.filling.last_seq)
    store.close()
    problems = _store(store.path, "verify", code=1)["problems"]  # file modes too: this is not a collector's process
    assert "2 rows missing in the key index" in problems
    assert "1 keys in the index of rows that are not stored" in problems
    store.open()


def test_a_failure_of_the_index_is_an_error_once_and_then_it_is_opened_again(store: Sent) -> None:
    store.send()
    assert store.filling.index._db is not None
    store.filling.index._db.close()  # raises from now on
    with pytest.raises(KeyIndexError):
        store.send()
    store.filling.cursor.execute("ROLLBACK")
    assert store.send() == 30


class _Unclosable:
    """Closes RocksDB's database, and fails in doing so."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def close(self) -> None:
        self._database.close()
        raise RuntimeError("planted")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


@pytest.mark.parametrize("name", ["close", "clear"])
def test_a_failure_to_close_the_index_is_logged_and_stops_nothing(
    store: Sent, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.send()
    index = store.filling.index
    index._db = _Unclosable(index._db)  # type: ignore[assignment]
    getattr(index, name)()
    assert "key index cannot be closed" in caplog.text
    assert store.send() == 30
    assert store.differences() == (0, 0)


def test_a_damaged_block_that_is_read_later_rebuilds_the_index(store: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("is_richer", [False, True])
def test_duplicates_from_all_over_the_store_are_found_without_reading_it(
    store: Sent, is_richer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.filling.add_many(100_000)
    cursor = store.filling.cursor
    rows = cursor.execute(
        "SELECT trace_id, span_id FROM stored.spans WHERE seq % 50 = 0"
    ).fetchall()  # of all 49 groups
    tokens: dict[str, Attribute] = {keys.COMPLETION_TOKEN_IDS: [1]} if is_richer else {}
    again = [span(int(trace, 16), int(number, 16), tokens) for trace, number in rows]
    store.filling.index.cover(cursor)
    add_places(cursor, 100_000)
    watched = _Watched(cursor)
    monkeypatch.setattr(store.filling, "cursor", watched)
    assert store.filling.add_spans(again) == len(again) == 2_000
    assert watched.n_scanned == 0
    live = "SELECT count(DISTINCT (trace_id, span_id)), count(*), count(*) FILTER (seq > 100_000) FROM spans"
    assert cursor.execute(live).fetchall() == [(100_000, 100_000, 2_000 if is_richer else 0)]


class _Watched:
    """A cursor that counts how many rows of the tables of rows each statement reads."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self.n_scanned = 0

    def execute(self, sql: str, *parameters: Any) -> Any:
        verb = sql.split(maxsplit=1)[0]
        if verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
            [(_, plan)] = self._cursor.execute(f"EXPLAIN (ANALYZE, FORMAT json) {sql}", *parameters).fetchall()
            self.n_scanned += sum(map(_rows_scanned, json.loads(plan)["operator"]))
            if verb != "SELECT":
                return self._cursor  # it was executed
        return self._cursor.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def _rows_scanned(node: Mapping[str, Any]) -> int:
    of_rows = any(name in str(node.get("extra_info")) for name in (".spans", ".logs", ".evaluations"))
    scanned: int = node.get("rows_scanned", 0) if of_rows else 0
    return scanned + sum(map(_rows_scanned, node.get("children", [])))


@pytest.mark.ci
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

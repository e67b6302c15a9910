"""`trainspan store` and retention: deleted data is gone from every file, and everything else stays."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from pyarrow import parquet

from tests.processing.support.labels import send_labels
from tests.support.collector.faults import jumping_clock
from tests.support.collector.process import (
    CollectorProcess,
    any_value,
    event,
    export,
    export_logs,
    get,
    key_values,
    read,
    running,
    select,
    span,
)
from tests.support.collector.process import trace_id as padded_trace_id
from trainspan_collector.store.database import Database
from trainspan_collector.store.snapshots import Readers
from trainspan_collector.store.sql_process import SqlLimits
from trainspan_schemas.artifacts.dataset import about_dir, manifest_path
from trainspan_schemas.errors import StoreError
from trainspan_schemas.store.labels import Label, pair_labels
from trainspan_schemas.store.views import STORE_VERSION, VIEWS
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids

pytestmark = pytest.mark.ci

BASE = 0x8F3A11C5D2E94B7766AA01F3C9D2B000  # ids that no file contains by chance
SECRET = "plaintext-marker-of-trace-"


def trace_id(trace: int) -> bytes:
    return padded_trace_id(BASE + trace)


def _store(store: Path, *arguments: str, code: int = 0) -> Any:
    """The output of `trainspan store`, which must exit with `code`; its stderr if that is not 0."""
    command = [sys.executable, "-m", "trainspan_cli", "store", *arguments, "--store", str(store), "--format", "json"]
    environment = {**os.environ, "TRAINSPAN_HOME": str(store.parent), "TRAINSPAN_LOG": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def _fill(collector: CollectorProcess, traces: range) -> None:
    """Per trace: a rollout `r<trace>` of task `t<trace>` with a rewarded rollout span, a call and a plain span; a log record
    in the trace, and a record without a trace that rewards the rollout."""
    for trace in traces:
        identity = {keys.ROLLOUT_ID: f"r{trace}", keys.TASK_ID: f"t{trace}"}
        marked = {"text": f"{SECRET}{trace}."}
        reward = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 0.5})
        export(
            collector.address,
            span(BASE + trace, 1, {**identity, keys.ROLLOUT_STATUS: "ok"}, events=[reward], name=f"{SECRET}{trace}."),
            span(BASE + trace, 2, {**identity, **marked, keys.PROMPT_TOKEN_IDS: encode_ids([trace])}),
            span(BASE + trace, 3, marked),
        )
        about = {**identity, keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 0.25}
        export_logs(
            collector.address,
            LogRecord(time_unix_nano=trace, trace_id=trace_id(trace), body=any_value(f"{SECRET}{trace}.")),
            LogRecord(time_unix_nano=trace, event_name=keys.EVALUATION_EVENT, attributes=key_values(about)),
        )


def _content(collector: CollectorProcess) -> dict[str, list[dict[str, Any]]]:
    return {name: sorted(get(collector.address, {"sql": f"FROM {name}"}).to_pylist(), key=repr) for name in VIEWS}


def _without(content: dict[str, list[dict[str, Any]]], *traces: int) -> dict[str, list[dict[str, Any]]]:
    """The expected rest: rows of other traces, and rows of other rollouts without a trace."""
    gone = {trace_id(trace).hex() for trace in traces}
    rollouts = {f"r{trace}" for trace in traces}
    return {
        name: [
            row
            for row in rows
            if row["trace_id"] not in gone
            and (row["trace_id"] is not None or not rollouts & {row.get("rollout_id"), _rollout(row)})
        ]
        for name, rows in content.items()
    }


def _rollout(row: dict[str, Any]) -> object:
    return json.loads(row.get("attributes") or "{}").get(keys.ROLLOUT_ID)


def _holds(folder: Path, marker: str) -> list[str]:
    """The files of the store that contain the marker as plain bytes."""
    return [path.name for path in folder.rglob("*") if path.is_file() and marker.encode() in path.read_bytes()]


def _dataset(folder: Path, *traces: int) -> None:
    folder.mkdir(parents=True)
    about_dir(folder).mkdir(exist_ok=True)
    manifest_path(folder).write_text("{}")
    ids = {"trace_id": [trace_id(trace).hex() for trace in traces], "rollout_id": [f"r{trace}" for trace in traces]}
    parquet.write_table(pa.table(ids), folder / "part-0000.parquet")


@pytest.mark.parametrize("is_running", [True, False])
def test_a_purged_trace_is_gone_from_every_byte_of_the_store_and_the_rest_stays(
    tmp_path: Path, is_running: bool
) -> None:
    store = tmp_path / "spans.duckdb"
    _dataset(tmp_path / "dataset" / "round-0001", 1, 2, 2)
    _dataset(tmp_path / "runs" / "a" / "dataset" / "round-0003", 3)
    damaged = tmp_path / "spans.duckdb.wal.damaged-7"
    with running(store) as collector:
        _fill(collector, range(1, 4))
        before = _content(collector)
        damaged.write_text(f"{SECRET}2.")
        kept = tmp_path / "spans.duckdb.quarantine"
        kept.mkdir(exist_ok=True)
        (kept / "1.traces.pb").write_bytes(trace_id(2))
        (kept / "2.traces.pb").write_bytes(trace_id(3))
        if not is_running:
            assert collector.terminate() == 0
        assert _holds(tmp_path, f"{SECRET}2.") != []
        counted = _store(store, "purge", "--trace", trace_id(2).hex())
        assert (counted["purged"], counted["rows"]) == (False, {"spans": 3, "logs": 2, "evaluations": 2})
        assert _holds(tmp_path, f"{SECRET}2.") != []
        answer = _store(store, "purge", "--trace", trace_id(2).hex(), "--yes")
        assert answer["purged"] is True
        assert answer["rows_left"] == {"spans": 0, "logs": 0, "evaluations": 0}
        assert (answer["ids_searched"], answer["found_in"]) == (1, [])
        assert answer["datasets"] == [{"path": str(tmp_path / "dataset" / "round-0001"), "rows": 2}]
        assert sorted(answer["files_removed"]) == [str(kept / "1.traces.pb"), str(damaged)]
        assert _holds(tmp_path, f"{SECRET}2.") == []
        assert (kept / "2.traces.pb").exists()
        if is_running:
            assert _content(collector) == _without(before, 2)
            _fill(collector, range(4, 5))  # it keeps working
            assert len(read(collector.address, "rollouts")) == 3
    with running(store) as again:
        left = _without(before, 2)
        assert {name: [row for row in rows if row in left[name]] for name, rows in _content(again).items()} == left
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("spans.duckdb*") if path.is_file()} == {0o600}


def test_the_same_bytes_prove_that_a_purge_is_no_mere_deletion(tmp_path: Path) -> None:
    """DuckDB leaves deleted rows in its file: that is why purge exists."""
    store = tmp_path / "spans.duckdb"
    with running(store) as collector:
        _fill(collector, range(1, 3))
        assert len(read(collector.address, "spans")) == 6
        assert collector.terminate() == 0
    import duckdb

    with duckdb.connect(str(store)) as connection:
        connection.execute(f"DELETE FROM stored.spans WHERE trace_id = '{trace_id(2).hex()}'")
        connection.execute("DELETE FROM stored.logs")
    assert _holds(tmp_path, f"{SECRET}2.") == ["spans.duckdb"]


def test_a_purge_by_task_takes_its_rollouts_and_leaves_others_in_the_same_trace(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb") as collector:
        _fill(collector, range(1, 3))
        mixed = [
            span(BASE + 9, number, {keys.ROLLOUT_ID: f"m{number}", keys.TASK_ID: f"t{number}"}) for number in (1, 2)
        ]
        export(collector.address, *mixed)
        answer = _store(collector.store, "purge", "--task", "t1", "--yes")
        assert answer["rows"] == {"spans": 4, "logs": 2, "evaluations": 2}
        assert sorted({row["trace_id"][-1] for row in read(collector.address, "spans")}) == ["2", "9"]
        assert [row["rollout_id"] for row in read(collector.address, "rollouts")] == ["r2"]
        assert select(collector.address, "SELECT rollout_id FROM stored.spans WHERE rollout_id ^@ 'm'") == [("m2",)]


def test_a_purge_by_task_takes_the_branches_of_its_rollouts_and_a_purge_of_branches_only_these(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb") as collector:
        for number, task in enumerate(["t", "t@r.0@1", "t@r.0@2", "t@home", "u@r.0@1"]):
            export(collector.address, span(BASE + number, 1, {keys.ROLLOUT_ID: f"r{number}", keys.TASK_ID: task}))

        def left() -> list[Any]:
            return sorted(select(collector.address, "SELECT rollout_id FROM stored.spans"))

        _store(collector.store, "purge", "--task", "t@r.0@2", "--yes")
        assert left() == [("r0",), ("r1",), ("r3",), ("r4",)]
        _store(collector.store, "purge", "--task", "t", "--yes")
        assert left() == [("r3",), ("r4",)]


def test_a_purge_by_time_goes_by_when_the_newest_of_a_trace_came(tmp_path: Path) -> None:
    faults = jumping_clock(tmp_path / "faults")
    with running(tmp_path / "spans.duckdb", faults=faults) as collector:
        (faults / "offset_s").write_text(str(-40 * 86_400))
        _fill(collector, range(1, 4))
        (faults / "offset_s").write_text("0")
        export(collector.address, span(BASE + 2, 9))  # trace 2 is alive
        _fill(collector, range(5, 6))
        answer = _store(collector.store, "purge", "--before", "30d", "--yes")
        # Traces 1 and 3, and the three records without a trace, of rollouts 1, 2 and 3.
        assert answer["rows"] == {"spans": 6, "logs": 5, "evaluations": 5}
        assert sorted({row["trace_id"][-1] for row in read(collector.address, "spans")}) == ["2", "5"]


def test_retention_deletes_old_traces_by_itself_and_keeps_the_living(tmp_path: Path) -> None:
    faults = jumping_clock(tmp_path / "faults")
    store = tmp_path / "spans.duckdb"
    with running(store, faults=faults) as collector:
        (faults / "offset_s").write_text(str(-40 * 86_400))
        _fill(collector, range(1, 3))
        (faults / "offset_s").write_text("0")
        export(collector.address, span(BASE + 2, 9))
    with running(store, retention_days=60) as patient:
        assert len({row["trace_id"] for row in read(patient.address, "spans")}) == 2
    with running(store, retention_days=30) as collector:
        deadline = time.monotonic() + 20
        while (left := {row["trace_id"] for row in read(collector.address, "spans")}) != {trace_id(2).hex()}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert [row["rollout_id"] for row in read(collector.address, "rollouts")] == ["r2"]
        _fill(collector, range(3, 4))
        assert len(read(collector.address, "rollouts")) == 2
        assert _store(store, "verify")["ok"] is True


def test_compacting_under_load_and_reading_loses_nothing_and_gives_space_back(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    stop = threading.Event()
    sent: list[int] = []
    counts: list[int] = []

    with running(store, load_interval_s=0.05, retention_days=100_000) as collector:
        for trace in range(1, 30):
            spans = [span(BASE + trace, number, {"text": os.urandom(5_000).hex()}) for number in range(1, 101)]
            export(collector.address, *spans)
        everything = read(collector.address, "spans", columns=["seq", "trace_id", "span_id"])
        assert len(everything) == 2_900

        def write() -> None:
            while not stop.is_set():
                number = len(sent) + 1
                export(collector.address, span(BASE + 1_000, number))
                sent.append(number)

        def count() -> None:
            while not stop.is_set():
                [(n_spans,)] = select(collector.address, "SELECT count(*) FROM spans")
                counts.append(n_spans)

        threads = [threading.Thread(target=write), threading.Thread(target=count)]
        for thread in threads:
            thread.start()
        _store(store, "compact")
        _store(store, "purge", "--before", "2000-01-01", "--yes")
        answer = _store(store, "purge", *(f"--trace={trace_id(trace).hex()}" for trace in range(1, 29)), "--yes")
        assert answer["rows"]["spans"] == 2_800
        small = _store(store, "compact")
        stop.set()
        for thread in threads:
            thread.join()
        assert small["bytes"] < small["rows"]["spans"] * 10_000
        assert select(
            collector.address, "SELECT count(*) FROM spans WHERE trace_id <> " + f"'{trace_id(1_000).hex()}'"
        ) == [(100,)]
        numbers = select(collector.address, f"SELECT span_id FROM spans WHERE trace_id = '{trace_id(1_000).hex()}'")
        assert sorted(int(number, 16) for (number,) in numbers) == sent
        assert len(counts) > 3
        assert max(counts) >= 2_900
        assert _store(store, "verify")["ok"] is True


def test_a_reader_that_does_not_end_keeps_the_file_in_place_and_new_readers_wait_no_longer(tmp_path: Path) -> None:
    database = Database(tmp_path / "spans.duckdb", memory_bytes=2**28)
    readers = Readers(SqlLimits(60, 2**29))
    with readers.snapshot(database):
        with pytest.raises(StoreError, match="1 readers hold the store"), readers.alone(0.1, 0.1):
            raise AssertionError("not alone")
        with readers.snapshot(database) as second:
            assert second.watermark == 0
    with readers.alone(0.1, 0.1):
        reached = threading.Event()
        waiting = threading.Thread(target=lambda: _read_and_set(readers, database, reached))
        waiting.start()
        assert not reached.wait(0.2)
    assert reached.wait(5)
    waiting.join()
    database.close()


def _read_and_set(readers: Readers, database: Database, reached: threading.Event) -> None:
    with readers.snapshot(database):
        reached.set()


def test_verify_is_content_with_a_good_store_and_names_what_is_wrong_with_a_bad_one(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store, load_interval_s=30) as collector:
        _fill(collector, range(1, 3))
        answer = _store(store, "verify")
        assert (answer["ok"], answer["problems"]) == (True, [])
        assert answer["rows"] | {"superseded": 0} == {
            "spans": 6, "logs": 4, "evaluations": 4, "superseded": 0, "places": 0, "progress": 1,
        }  # fmt: skip
    import duckdb

    with duckdb.connect(str(store)) as connection:
        connection.execute("INSERT INTO stored.spans SELECT * REPLACE (99 AS seq) FROM stored.spans LIMIT 1")
    store.chmod(0o644)
    quarantine = tmp_path / "spans.duckdb.quarantine"
    quarantine.mkdir(exist_ok=True)
    (quarantine / "x.pb").touch(0o666)
    (quarantine / "x.pb").chmod(0o644)
    answer = _store(store, "verify", code=1)
    assert answer["ok"] is False
    text = "\n".join(answer["problems"])
    assert "1 duplicate spans" in text
    assert "1 row numbers above the last one" in text
    assert "x.pb can be read by others (mode 644)" in text


def test_verify_finds_a_flipped_bit_in_the_file(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store) as collector:
        export(
            collector.address,
            *(span(BASE + 1, number, {"text": os.urandom(2_000).hex()}) for number in range(1, 2_049)),
        )
    data = bytearray(store.read_bytes())
    data[len(data) // 2] ^= 0x04
    store.write_bytes(data)
    answer = _store(store, "verify", code=1)
    assert any("cannot be read" in problem for problem in answer["problems"])


def test_stats_say_what_there_is(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store) as collector:
        _fill(collector, range(1, 3))
        stats = _store(store, "stats")
        expected = {
            "spans": 6,
            "logs": 4,
            "calls": 2,
            "evaluations": 4,
            "rollouts": 2,
            "traces": 2,
            "version": STORE_VERSION,
        }
        assert expected.items() <= stats.items()
        assert abs(stats["newest_received_ns"] - time.time_ns()) < 60 * 10**9
        assert stats["store_bytes_per_call"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["purge"], "exactly one of --trace, --task and --before"),
        (["purge", "--trace", "xyz"], "'xyz' is not 32 lower-case hex digits"),
        (["purge", "--task", "t", "--before", "1d"], "exactly one of"),
        (["purge", "--before", "yesterday"], "not a date, time or age"),
        (["compact", "--yes"], "belong to purge"),
    ],
)
def test_a_purge_that_cannot_be_meant_is_refused(
    collector: CollectorProcess, arguments: list[str], message: str
) -> None:
    code = 1 if "xyz" in arguments else 2
    assert message in _store(collector.store, *arguments, code=code)


def test_verify_names_a_journal_segment_that_lost_its_bytes(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    with running(store, load_interval_s=30) as collector:
        _fill(collector, range(1, 3))
        collector.kill()
    segment, *_ = sorted(Path(f"{store}.journal").glob("*.journal"))
    os.truncate(segment, 0)
    with running(store):
        answer = _store(store, "verify", code=1)
    assert answer["problems"] == [f"{segment.name} is empty: it was truncated, or never written to"]


def test_what_a_person_labeled_is_not_deleted_by_age_but_by_its_trace(tmp_path: Path) -> None:
    faults = jumping_clock(tmp_path / "faults")
    with running(tmp_path / "spans.duckdb", faults=faults) as collector:
        (faults / "offset_s").write_text(str(-40 * 86_400))
        for number in range(1, 5):
            export(collector.address, span(BASE + number, 1, {keys.ROLLOUT_ID: f"r{number}", keys.ATTEMPT: 0}))
            export(collector.address, span(BASE + number, 2))
        labels = [
            Label("r1", 0, "good", "ann", 1),
            Label("r2", 0, "good", "ann", 1),
            Label("r2", 0, "withdrawn", "ann", 2),
        ]
        pair = pair_labels((("r3", 0), ("r1", 0)), "equal", by="ann", time_ns=1, reason=None)
        send_labels(str(collector.address.grpc), *labels, *pair)
        counted = _store(collector.store, "purge", "--before", "1s")
        assert (counted["rollouts"], counted["labeled"]) == (2, 2)
    with running(tmp_path / "spans.duckdb", retention_days=30) as collector:
        deadline = time.monotonic() + 20
        while len(left := {row["trace_id"][-1] for row in read(collector.address, "spans")}) > 2:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert left == {"1", "3"}
        assert {row["rollout_id"] for row in read(collector.address, "evaluations")} == {"r1", "r3"}
        assert {row["rollout_id"] for row in read(collector.address, "logs")} == {"r1", "r3"}
        _store(collector.store, "purge", "--trace", trace_id(1).hex(), "--yes")
        assert {row["rollout_id"] for row in read(collector.address, "evaluations")} == {"r3"}


def test_a_pair_that_was_withdrawn_leaves_the_other_pairs_of_its_rollouts_labeled(tmp_path: Path) -> None:
    faults = jumping_clock(tmp_path / "faults")
    with running(tmp_path / "spans.duckdb", faults=faults) as collector:
        (faults / "offset_s").write_text(str(-40 * 86_400))
        for number in range(1, 4):
            export(collector.address, span(BASE + number, 1, {keys.ROLLOUT_ID: f"r{number}", keys.ATTEMPT: 0}))
        stands = pair_labels((("r1", 0), ("r2", 0)), "better", by="ann", time_ns=1, reason=None)
        first = pair_labels((("r1", 0), ("r3", 0)), "better", by="ann", time_ns=2, reason=None)
        withdrawn = pair_labels((("r1", 0), ("r3", 0)), "withdrawn", by="ann", time_ns=3, reason=None)
        send_labels(str(collector.address.grpc), *stands, *first, *withdrawn)
        counted = _store(collector.store, "purge", "--before", "1s", "--yes")
        assert (counted["rollouts"], counted["labeled"]) == (1, 2)
        assert {row["rollout_id"] for row in read(collector.address, "spans")} == {"r1", "r2"}
        assert {row["rollout_id"] for row in read(collector.address, "evaluations")} == {"r1", "r2"}

"""Reads through Flight: what readers see, and what queries cannot do."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from pyarrow import flight

from tests.support.collector.process import (
    CollectorProcess,
    call_options,
    event,
    export,
    export_logs,
    get,
    read,
    running,
    select,
    span,
    trace_id,
)
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.tokens import encode_ids

TOKENS = {keys.PROMPT_TOKEN_IDS: encode_ids([1])}


def _error(collector: CollectorProcess, ticket: object) -> str:
    with pytest.raises(flight.FlightError) as caught:
        get(collector.address, ticket)
    message = str(caught.value).partition(". Detail:")[0]
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def two_runs(collector: CollectorProcess) -> CollectorProcess:
    """Runs a (rounds 1 and 2) and b (round 1), one rollout with one call each: rollouts a1, a2, b1, traces 1, 2, 3."""
    for trace, (run, round_) in enumerate([("a", 1), ("a", 2), ("b", 1)], start=1):
        identity = {keys.ROLLOUT_ID: f"{run}{round_}", keys.RUN_ID: run, keys.ROUND: round_}
        reward = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1.0})
        export(
            collector.address,
            span(trace, 1, {**identity, keys.ROLLOUT_STATUS: "ok"}, events=[reward]),
            span(trace, 2, TOKENS),
        )
    return collector


@pytest.mark.parametrize(
    ("parameters", "rollouts"),
    [
        ({}, ["a1", "a2", "b1"]),
        ({"run_id": "a"}, ["a1", "a2"]),
        ({"round": 1}, ["a1", "b1"]),
        ({"run_id": "a", "round": 2}, ["a2"]),
        ({"rollout_ids": ["b1", "a1", "none"]}, ["a1", "b1"]),
        ({"rollout_ids": []}, []),
        ({"run_id": "' OR true --"}, []),
        ({"run_id": None}, ["a1", "a2", "b1"]),
    ],
)
def test_parameters_select_rows_by_their_rollout(
    two_runs: CollectorProcess, parameters: dict[str, object], rollouts: list[str]
) -> None:
    traces = {trace_id(number).hex(): name for number, name in enumerate(("a1", "a2", "b1"), start=1)}
    for name in ("rollouts", "calls", "evaluations", "spans"):
        found = sorted(traces[row["trace_id"]] for row in read(two_runs.address, name, **parameters))
        assert found == sorted(rollouts * (2 if name == "spans" else 1))


@pytest.mark.parametrize("name", ["spans", "calls", "evaluations", "rollouts", "logs"])
def test_a_read_without_parameters_is_the_view(two_runs: CollectorProcess, name: str) -> None:
    record = LogRecord(time_unix_nano=1, trace_id=trace_id(1))
    export_logs(two_runs.address, record)
    view = get(two_runs.address, {"sql": f"SELECT * FROM {name}"})
    rows = get(two_runs.address, {"read": name, "parameters": {"columns": view.schema.names}})
    assert rows.schema.remove_metadata() == view.schema.remove_metadata()
    assert view.num_rows > 0
    assert sorted(map(repr, rows.to_pylist())) == sorted(map(repr, view.to_pylist()))


def test_columns_come_alone_and_in_the_order_asked_for(two_runs: CollectorProcess) -> None:
    rows = read(two_runs.address, "calls", columns=["round", "prompt_ids", "rollout_id"], run_id="b")
    assert [list(row.items()) for row in rows] == [[("round", 1), ("prompt_ids", [1]), ("rollout_id", "b1")]]


@pytest.mark.parametrize(
    ("ticket", "message"),
    [
        ("no object", 'exactly one of "read" and "sql"'),
        ({"read": "spans", "sql": "SELECT 1"}, 'exactly one of "read" and "sql"'),
        ({"read": "passwords"}, "unknown read 'passwords'; reads are spans, logs, calls"),
        ({"read": "spans", "parameters": {"runid": "x"}}, "no parameter 'runid'; parameters are run_id"),
        ({"read": "spans", "parameters": {"columns": ["x"]}}, "no column 'x'"),
        ({"read": "spans", "parameters": {"columns": []}}, "columns is empty"),
        ({"read": "spans", "parameters": {"round": "1"}}, "round = '1' is not of type int"),
        ({"read": "spans", "parameters": {"rollout_ids": "a1"}}, "is not a list of strings"),
        ({"read": "spans", "wait_ms": -1}, "wait_ms = -1 is not between"),
        ({"read": "spans", "limit": 1}, "unknown member 'limit'"),
    ],
)
def test_a_ticket_that_cannot_be_meant_is_refused_in_one_line(
    two_runs: CollectorProcess, ticket: object, message: str
) -> None:
    assert message in _error(two_runs, ticket)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 1; SELECT 2",
        "",
        "WITH gone AS (DELETE FROM stored.spans RETURNING *) SELECT * FROM gone",
        "WITH more AS (INSERT INTO stored.progress VALUES (9, 9, 9) RETURNING *) SELECT * FROM more",
        "INSERT INTO stored.progress VALUES (9, 9, 9)",
        "UPDATE stored.progress SET last_seq = 0",
        "DROP VIEW spans",
        "CREATE TABLE t AS SELECT 1",
        "SET memory_limit = '1GB'",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "PRAGMA threads=1",
        "COPY spans TO '/tmp/out.csv'",
        "COPY (SELECT 1) TO '/tmp/out.csv'",
        "EXPORT DATABASE '/tmp/out'",
        "ATTACH '/tmp/other.duckdb'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CALL enable_logging()",
        "CHECKPOINT",
        "COMMIT",
        "EXPLAIN ANALYZE DELETE FROM stored.spans",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_parquet('https://example.com/x.parquet')",
        "SELECT * FROM query('DELETE FROM stored.spans')",
        "SELECT * FROM snapshot",
        "SELECT getenv('HOME')",
        "SELECT * FROM duckdb_secrets()",
    ],
)
def test_a_query_can_read_the_store_and_nothing_else(two_runs: CollectorProcess, query: str) -> None:
    assert _error(two_runs, {"sql": query})
    assert select(two_runs.address, "SELECT count(*) FROM spans") == [(6,)]


def test_a_read_sees_all_that_was_acknowledged_before_it_at_any_load_interval(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", load_interval_s=30) as lazy:
        for number in range(1, 20):
            export(lazy.address, span(1, number))
            table = get(lazy.address, {"read": "spans", "parameters": {"columns": ["seq"]}})
            assert table.num_rows == number
            assert table.schema.metadata == {b"watermark": str(number).encode(), b"behind": b"false"}
        export(lazy.address, span(1, 20))
        table = get(lazy.address, {"read": "spans", "wait_ms": 0})
        assert table.num_rows == 20 or (table.num_rows, table.schema.metadata[b"behind"]) == (19, b"true")
        assert table.schema.metadata[b"watermark"] == str(table.num_rows).encode()


def test_a_reader_that_continues_from_its_watermark_sees_every_row_exactly_once(collector: CollectorProcess) -> None:
    done = threading.Event()

    def write(trace: int) -> None:
        number = 0
        while not done.is_set():
            export(collector.address, *(span(trace, number + index, {keys.RUN_ID: "w"}) for index in range(1, 6)))
            number += 5
        sent[trace] = number

    sent: dict[int, int] = {}
    writers = [threading.Thread(target=write, args=(trace,)) for trace in (1_001, 1_002)]
    for writer in writers:
        writer.start()
    seen: list[tuple[str, str]] = []
    watermark = 0

    def follow() -> int:
        table = get(collector.address, {"sql": f"SELECT seq, trace_id, span_id FROM spans WHERE seq > {watermark}"})
        reached = int(table.schema.metadata[b"watermark"])
        rows = table.to_pylist()
        assert all(watermark < row["seq"] <= reached for row in rows)
        seen.extend((row["trace_id"], row["span_id"]) for row in rows)
        return reached

    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        watermark = follow()
    done.set()
    for writer in writers:
        writer.join()
    watermark = follow()
    assert len(seen) == len(set(seen))
    for trace, n_sent in sent.items():
        assert sum(row[0] == trace_id(trace).hex() for row in seen) == n_sent > 0


def test_what_belongs_to_no_rollout_can_be_read_alone(collector: CollectorProcess) -> None:
    export(collector.address, span(2_101, 1, {**TOKENS, keys.ROLLOUT_ID: "someone"}), span(2_102, 1, TOKENS))
    for name in ("spans", "calls"):
        found = read(collector.address, name, without_rollout=True)
        assert trace_id(2_102).hex() in {row["trace_id"] for row in found}
        assert {row["rollout_id"] for row in found} == {None}


def test_since_seq_gives_the_whole_of_each_rollout_and_trace_that_something_touched(
    collector: CollectorProcess,
) -> None:
    identity = {keys.ROLLOUT_ID: "touched", keys.RUN_ID: "touch"}
    export(collector.address, span(2_001, 1, {**identity, **TOKENS}), span(2_002, 1, TOKENS), span(2_003, 1, TOKENS))
    table = get(collector.address, {"read": "spans"})
    watermark = int(table.schema.metadata[b"watermark"])
    assert read(collector.address, "calls", since_seq=watermark) == []
    export(collector.address, span(2_004, 1, identity), span(2_002, 2))  # same rollout; same trace
    found = {row["trace_id"] for row in read(collector.address, "calls", since_seq=watermark)}
    assert found == {trace_id(2_001).hex(), trace_id(2_002).hex()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector with little memory and a short time limit for queries."""
    path = tmp_path_factory.mktemp("small") / "spans.duckdb"
    with running(path, sql_memory_bytes=192 * 2**20, sql_timeout_s=3) as started:
        yield started


def test_a_query_that_takes_too_long_is_ended(small: CollectorProcess) -> None:
    began = time.monotonic()
    message = _error(small, {"sql": "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b"})
    assert "it took more than 3 s" in message
    assert time.monotonic() - began < 10


def test_queries_that_exhaust_memory_fail_alone_and_loading_continues(small: CollectorProcess) -> None:
    greedy = {"sql": "SELECT list(md5(range::VARCHAR) ORDER BY range) FROM range(20000000)"}
    failures: list[str] = []
    stop = threading.Event()

    def exhaust() -> None:
        while not stop.is_set():
            failures.append(_error(small, greedy))

    readers = [threading.Thread(target=exhaust) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, 21):
        export(small.address, *(span(number, index, {"text": "x" * 4_000}) for index in range(1, 65)))
    stop.set()
    for reader in readers:
        reader.join()
    assert failures
    assert small.process.poll() is None
    assert select(small.address, "SELECT count(*) FROM spans") == [(20 * 64,)]


def test_an_undrained_stream_blocks_neither_loading_nor_other_readers(collector: CollectorProcess) -> None:
    export(collector.address, *(span(3_000, number, {"text": "x" * 20_000}) for number in range(1, 1_000)))
    with flight.connect(f"grpc://{collector.address.flight}") as client:
        undrained = client.do_get(
            flight.Ticket(json.dumps({"read": "spans"}).encode()), call_options(collector.address)
        )
        first = undrained.read_chunk().data.num_rows
        export(collector.address, span(3_001, 1))
        assert [row["trace_id"] for row in read(collector.address, "spans")].count(trace_id(3_001).hex()) == 1
        rest = sum(chunk.data.num_rows for chunk in undrained)
    watermark = int(undrained.schema.metadata[b"watermark"])
    [(expected,)] = select(collector.address, f"SELECT count(*) FROM spans WHERE seq <= {watermark}")
    assert first + rest == expected  # a snapshot of its start, whatever arrived since


def test_spans_and_log_records_without_a_rollout_have_that_of_their_trace(collector: CollectorProcess) -> None:
    export(collector.address, span(901, 1, {keys.ROLLOUT_ID: "of-901"}), span(901, 2), span(902, 1))
    export_logs(collector.address, *(LogRecord(trace_id=trace_id(number), event_name="e") for number in (901, 902)))
    traces = ", ".join(f"'{trace_id(number).hex()}'" for number in (901, 902))
    where = f"WHERE trace_id IN ({traces}) ORDER BY seq"
    spans = select(collector.address, f"SELECT rollout_id FROM spans {where}")
    logs = select(collector.address, f"SELECT rollout_id FROM logs {where}")
    assert (spans, logs) == ([("of-901",), ("of-901",), (None,)], [("of-901",), (None,)])

"""Spans of several MiB: the memory that a real collector takes does not depend on how large they are."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from pyarrow import flight

from tests.processing.support.traces import TestRollout, send
from tests.support.collector.filling import Filling
from tests.support.collector.process import (
    ANY_PORT,
    TRACES,
    CollectorProcess,
    call_options,
    export,
    export_logs,
    get,
    running,
    select,
    span,
    span_id,
    trace_id,
    trace_request,
)
from tests.support.collector.process import send as post
from tests.support.otlp.http import request as ask
from trainspan_collector.store.database import Database
from trainspan_collector.store.row_groups import largest_row_bytes, rows_at_once, scan_settings
from trainspan_schemas.resources import available_cores
from trainspan_schemas.telemetry import keys

MIB = 2**20
SAMPLE_S = 0.1
BOUND_MIB = 900


@dataclass
class Peak:
    """The most memory that a collector and all processes below it had together, in MiB."""

    mib: int = 0


@contextlib.contextmanager
def _watched(collector: CollectorProcess) -> Iterator[Peak]:
    peak, over = Peak(), threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            peak.mib = max(peak.mib, _of_all_mib(collector))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _of_all_mib(collector: CollectorProcess) -> int:
    """The proportional memory of the collector and all processes below it."""
    kib, pids = 0, [collector.process.pid]
    while pids:
        pid = pids.pop()
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, path.read_text().split())
            found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            kib += int(found[1]) if found else 0
    return kib // 1024


def _rollout(number: int, n_calls: int, n_tokens: int) -> TestRollout:
    """Calls with a prompt of `n_tokens` and about a third of its bytes of text."""
    chance = random.Random(number)
    rollout = TestRollout(f"r{number}", begins=200.0 * number).reward(float(number % 2))
    for index in range(n_calls):
        rollout.call(index, [1], list(range(8)))
        tokens = b"".join(chance.randrange(50_000).to_bytes(4, "little") for _ in range(4096))
        attributes = rollout.spans[-1].attributes
        attributes[keys.PROMPT_TOKEN_IDS] = tokens * (n_tokens // 4096)
        attributes["gen_ai.input.messages"] = chance.randbytes(_text_bytes(n_tokens) // 2).hex()
    return rollout


def _text_bytes(n_tokens: int) -> int:
    return 4 * n_tokens * 2 // 7


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_400_spans_of_4_mib_are_loaded_compacted_and_read_in_the_usual_memory(tmp_path: Path) -> None:
    n_rollouts, n_calls, n_tokens = 40, 10, 3 * MIB // 4
    store, n_all = tmp_path / "spans.duckdb", n_rollouts * n_calls
    with running(store, log="WARNING") as collector, _watched(collector) as loading:
        for number in range(n_rollouts):
            send(str(collector.address.grpc), [_rollout(number, n_calls, n_tokens)])
        count = "SELECT count(*) AS n FROM calls"
        assert get(collector.address, {"sql": count, "wait_ms": 600_000})["n"].to_pylist() == [n_all]
        collector.kill()
        assert "opening the store again" not in _log(collector)
    with running(store, log="WARNING", sql_timeout_s=600) as collector, _watched(collector) as reading:
        assert select(collector.address, "SELECT count(*), sum(len(prompt_ids))::BIGINT FROM calls") == [
            (n_all, n_all * n_tokens)
        ]
        texts = "SELECT sum(strlen(attributes->>'$.\"gen_ai.input.messages\"'))::BIGINT FROM spans"
        assert select(collector.address, texts) == [(n_all * (_text_bytes(n_tokens) // 2 * 2),)]
        _check_reads(collector, n_all, n_calls, n_tokens)
        assert _act(collector, "compact")["rows"]["spans"] == n_all + n_rollouts
        assert _act(collector, "verify")["problems"] == []
        _check_reads(collector, n_all, n_calls, n_tokens)
        manifest = _dataset(store, tmp_path)
        assert (manifest["calls_seen"], manifest["calls_kept"]) == (n_all, n_all)
        collector.terminate()
        assert "again" not in _log(collector)
    assert max(loading.mib, reading.mib) < BOUND_MIB


@pytest.mark.ci
def test_spans_of_1_mib_are_loaded_compacted_and_read_in_half_of_the_usual_memory(tmp_path: Path) -> None:
    n_calls, n_tokens = 40, MIB // 5 // 4096 * 4096
    limits = {"duckdb_memory_bytes": 72 * MIB, "load_interval_s": 0.1}
    with running(tmp_path / "spans.duckdb", log="WARNING", **limits) as collector:
        send(str(collector.address.grpc), [_rollout(1, n_calls, n_tokens)])
        get(collector.address, {"sql": "SELECT 1", "wait_ms": 60_000})  # all is loaded
        _check_reads(collector, n_calls, n_calls, n_tokens)
        assert _act(collector, "compact")["rows"]["spans"] == n_calls + 1
        _check_reads(collector, n_calls, n_calls, n_tokens)
        collector.kill()
        assert "again" not in _log(collector)


def _check_reads(collector: CollectorProcess, n_all: int, n_calls: int, n_tokens: int) -> None:
    """Everything by name and by SQL, and one rollout: as many rows and bytes as were sent, and one prompt whole."""
    tokens, text = 4 * n_tokens, _text_bytes(n_tokens) // 2 * 2
    by_name = {"read": "calls", "parameters": {"columns": ["seq", "prompt_ids", "attributes"]}}
    one = {"read": "calls", "parameters": {"columns": ["seq", "prompt_ids"], "rollout_ids": ["r1"]}}
    for ticket, n_rows, n_bytes in (
        (by_name, n_all, n_all * (tokens + text)),
        ({"sql": "SELECT * FROM calls"}, n_all, n_all * tokens),
        ({"sql": "SELECT seq, attributes FROM spans WHERE name = 'any'"}, None, n_all * text),
        (one, n_calls, n_calls * tokens),
    ):
        found_rows, found_bytes = _streamed(collector, ticket)
        assert found_rows == n_rows or n_rows is None
        assert n_bytes <= found_bytes < 1.1 * n_bytes
    [call] = get(collector.address, {"sql": "SELECT prompt_ids FROM calls WHERE rollout_id = 'r1' AND call_index = 3"})[
        "prompt_ids"
    ]
    sent = next(span for span in _rollout(1, n_calls, n_tokens).spans if span.attributes.get(keys.CALL_INDEX) == 3)
    assert np.asarray(call.values).tobytes() == sent.attributes[keys.PROMPT_TOKEN_IDS]


def test_a_resource_that_many_spans_share_is_loaded_in_parts(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", log="WARNING", duckdb_memory_bytes=64 * MIB) as collector:
        spans = [span(5, number) for number in range(1, 201)]
        export(collector.address, *spans, resource={"text": "x" * 500_000})  # 100 MB of rows
        [counted] = get(
            collector.address,
            {"sql": "SELECT count(*) AS n, min(strlen(resource)) AS size FROM spans", "wait_ms": 60_000},
        ).to_pylist()
        assert counted["n"] == 200
        assert counted["size"] > 500_000
    assert "again" not in _log(collector)


@pytest.mark.ci
def test_a_span_of_more_than_16_mib_is_rejected_by_name_and_counted_and_the_others_are_stored(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", http=ANY_PORT) as collector, _watched(collector) as peak:
        large = span(6, 1, {"text": "x" * 17 * MIB}, name="large")
        request = trace_request(large, span(6, 2, {"text": "y" * 15 * MIB}), span(6, 3))
        request.MergeFrom(trace_request(span(6, 4, name="shares"), resource={"text": "x" * 17 * MIB}))
        answer = post(collector.address, TRACES, request.SerializeToString())
        assert b"2 rejected: 'large'" in answer
        assert b"'shares'" in answer
        assert b"more than 16777216" in answer
        record = LogRecord(body=AnyValue(string_value="x" * 17 * MIB), event_name="long")
        assert b"1 rejected: 'long'" in export_logs(collector.address, record)
        sizes = "SELECT span_id, strlen(attributes) // 1000000 FROM spans ORDER BY ALL"
        assert select(collector.address, sizes) == [(span_id(2).hex(), 15), (span_id(3).hex(), 0)]
        assert select(collector.address, "SELECT count(*) FROM logs") == [(0,)]
        metrics = ask(collector.address, "/metrics", method="GET").body.decode()
        for signal, n_rejected in (("traces", 2), ("logs", 1)):
            line = f'trainspan_collector_rejected_items_total{{reason="too_large",signal="{signal}"}} {n_rejected}.0'
            assert line in metrics
    assert peak.mib < BOUND_MIB


def test_row_groups_are_bounded_and_given_back_when_their_rows_are_gone(tmp_path: Path) -> None:
    database = Database(tmp_path / "spans.duckdb", memory_bytes=144 * MIB)
    filling = Filling(database, tmp_path / "keys")
    chance = random.Random(3)
    try:
        for first, sizes in (
            (1, [10] * 50),
            (100, [4 * MIB] * 9),
            (200, [10] * 30),
            (300, [5 * MIB]),
            (400, [10] * 40),
        ):
            texts = [chance.randbytes(size // 2).hex() for size in sizes]
            filling.add_spans([span(first, first + number, {"t": text}) for number, text in enumerate(texts)])
        database.checkpoint()
        assert _rows_by_group(filling) == [50, 3, 3, 3, 30 + 1 + 40]
        assert select_all(filling, "SELECT count(*), count(DISTINCT seq) FROM spans") == [(130, 130)]
        assert rows_at_once(largest_row_bytes(filling.cursor)) == 2
        used = _used_bytes(filling)
        assert filling.expire(days=0) == 130
        database.checkpoint()
        assert used > 20 * MIB
        assert _used_bytes(filling) < 2 * MIB
    finally:
        filling.close()
        database.close()


def test_rows_that_were_replaced_are_forgotten_next_to_empty_rows(tmp_path: Path) -> None:
    database = Database(tmp_path / "spans.duckdb", memory_bytes=144 * MIB)
    filling = Filling(database, tmp_path / "keys")
    try:
        filling.add_spans([span(1, 1)])
        assert filling.add_spans([span(1, 1, {"t": "richer"})]) == 1
        filling.add_spans([span(2, 1, {"t": "x" * MIB})], received_ns=time.time_ns() + 10**15)
        empty = "SELECT count(*) FROM stored.spans WHERE seq IS NULL"
        replaced = "SELECT count(*) FROM stored.superseded"
        assert select_all(filling, f"{empty} UNION ALL {replaced}") == [(2047,), (1,)]
        assert filling.expire(days=0) == 2
        assert select_all(filling, f"{empty} UNION ALL {replaced}") == [(2047,), (0,)]
        assert select_all(filling, "SELECT trace_id FROM spans") == [(trace_id(2).hex(),)]
    finally:
        filling.close()
        database.close()


@pytest.mark.parametrize(
    ("sizes", "has_empty", "is_apart"),
    [([8_000] * 2_100, False, False), ([100_000, *[500] * 2_047], False, True), ([100_000] * 200, True, True)],
)
def test_empty_rows_only_fill_large_groups_and_settings_follow_the_largest_row(
    tmp_path: Path, sizes: list[int], has_empty: bool, is_apart: bool
) -> None:
    setting = "SELECT value <> '' FROM duckdb_settings() WHERE name = 'disabled_optimizers'"
    with closing(Database(tmp_path / "spans.duckdb", memory_bytes=144 * MIB)) as database:
        assert database.cursor().execute(setting).fetchall() == [(False,)]
        with closing(Filling(database, tmp_path / "keys")) as filling:
            filling.add_spans([span(1, number, {"t": "x" * size}) for number, size in enumerate(sizes, start=1)])
            assert select_all(filling, "SELECT count(*) > 0 FROM stored.spans WHERE seq IS NULL") == [(has_empty,)]
        assert database.cursor().execute(setting).fetchall() == [(is_apart,)]
    with closing(Database(tmp_path / "spans.duckdb", memory_bytes=144 * MIB)) as database:
        assert database.cursor().execute(setting).fetchall() == [(is_apart,)]


@pytest.mark.parametrize(
    ("largest_kib", "memory_mib", "n_threads", "is_apart"),
    [(0, 64, 1, False), (32, 144, 2, True), (32, 256, 2, False), (256, 2048, 2, False), (256, 2048, 8, True)],
)
def test_groups_are_kept_apart_if_2048_rows_would_not_fit_into_a_threads_memory(
    largest_kib: int, memory_mib: int, n_threads: int, is_apart: bool
) -> None:
    assert bool(scan_settings(1024 * largest_kib, memory_mib * MIB, n_threads)) == is_apart


@pytest.mark.parametrize(("memory_mib", "most"), [(12, 1), (100, 1), (144, 2), (640, 10)])
def test_the_number_of_threads_follows_the_memory(tmp_path: Path, memory_mib: int, most: int) -> None:
    with closing(Database(tmp_path / "spans.duckdb", memory_bytes=memory_mib * MIB)) as database:
        [(n_threads,)] = database.cursor().execute("SELECT current_setting('threads')").fetchall()
    assert n_threads == min(most, available_cores())


def select_all(filling: Filling, sql: str) -> list[tuple[Any, ...]]:
    return filling.cursor.execute(sql).fetchall()


def _rows_by_group(filling: Filling) -> list[int]:
    """Rows that are not empty."""
    groups = "SELECT row_group_id, sum(count)::BIGINT FROM pragma_storage_info('stored.spans')"
    ends, found = 0, []
    for _, n_rows in select_all(
        filling, f"{groups} WHERE column_name = 'kind' AND segment_type <> 'VALIDITY' GROUP BY ALL ORDER BY 1"
    ):
        where = f"rowid >= {ends} AND rowid < {ends + n_rows}"
        [(count,)] = select_all(filling, f"SELECT count(seq) FROM stored.spans WHERE {where}")
        ends, found = ends + n_rows, [*found, count]
    return found


def _used_bytes(filling: Filling) -> int:
    size = "SELECT block_size * used_blocks FROM pragma_database_size() WHERE database_name = 'store'"
    [(used,)] = select_all(filling, size)
    return int(used)


def _log(collector: CollectorProcess) -> str:
    assert collector.process.stderr is not None
    return collector.process.stderr.read()


def _streamed(collector: CollectorProcess, ticket: dict[str, Any]) -> tuple[int, int]:
    """Rows and tokens of an answer of which no more than the next rows are held."""
    n_rows = n_bytes = 0
    with flight.connect(f"grpc://{collector.address.flight}") as client:
        reader = client.do_get(flight.Ticket(json.dumps(ticket).encode()), call_options(collector.address))
        for chunk in reader:
            n_rows += chunk.data.num_rows
            n_bytes += chunk.data.nbytes
    return n_rows, n_bytes


def _act(collector: CollectorProcess, name: str) -> dict[str, Any]:
    with flight.connect(f"grpc://{collector.address.flight}") as client:
        [answer] = client.do_action(flight.Action(name, b"{}"), call_options(collector.address))
    result: dict[str, Any] = json.loads(answer.body.to_pybytes())
    return result


def _dataset(store: Path, folder: Path) -> dict[str, Any]:
    command = ["dataset", "--store", str(store), "--out", str(folder / "dataset"), "--run", "run", "--round", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "trainspan_cli", *command, "--format", "json"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "TRAINSPAN_HOME": str(store.parent)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = json.loads(done.stdout)
    return manifest

"""The row process makes the same rows as the collector itself, and none are lost whatever happens to it."""

import copy
import logging
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.support.collector.process import (
    CollectorProcess,
    any_value,
    event,
    export,
    export_logs,
    running,
    select,
    span,
    trace_id,
    trace_request,
)
from trainspan_collector.journal.frames import Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.quarantine import Quarantine
from trainspan_collector.journal.segments import LoadProgress, Position
from trainspan_collector.load.batcher import Batcher, PendingBatch, ReadyBatch
from trainspan_collector.load.batcher_process import BatcherProcess, BatcherProcessError
from trainspan_collector.rows.tally import Tally
from trainspan_schemas.telemetry import keys

START = LoadProgress(Position(0, 0), 0)
BROKEN = b"\xff\xff\xff\xffnot protobuf"
REWARD = event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 0.5})
CALL = {keys.PROMPT_TOKEN_IDS: bytes(400), keys.COMPLETION_TOKEN_IDS: bytes(40), keys.COMPLETION_LOGPROBS: bytes(40)}


def _journal(folder: Path) -> Journal:
    """40 requests of 3 spans, some with evaluations or sent twice, and two that are broken."""
    journal = Journal(folder, segment_bytes=5_000)
    for number in range(40):
        spans = [
            span(1 + number, 3 * number + i, CALL if i else {}, events=[REWARD] if i == 1 else []) for i in (1, 2, 3)
        ]
        body = trace_request(*spans, *spans[:1]).SerializeToString()
        journal.append(Signal.TRACES, BROKEN if number in (7, 30) else body, 10 + number)
    return journal


def _drained(batcher: Batcher | BatcherProcess, end: Position) -> list[ReadyBatch]:
    """All batches, each copied before the next one overwrites it."""
    taken: list[ReadyBatch] = []
    while not taken or taken[-1].progress.position < end:
        batcher.fill()
        batch = batcher.next_batch()
        taken.append(replace(batch, tables=copy.deepcopy(batch.tables)))
    return taken


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return _journal(tmp_path / "journal")


def test_it_gives_the_batches_that_the_collector_would_make(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = Quarantine(tmp_path / "here"), Quarantine(tmp_path / "there")
    own = Batcher(journal, START, here, max_bytes=12_000)
    expected = _drained(own, journal.end())
    begun = Batcher(journal, START, there, max_bytes=12_000)
    begun.fill()
    first = begun.next_batch()
    begun.fill()  # rows gathered so far are handed over
    caplog.clear()
    process = BatcherProcess(journal, begun.gathered, there, max_bytes=12_000)
    got = [first, *_drained(process, journal.end())]
    assert [taken.progress for taken in got] == [taken.progress for taken in expected]
    for one, other in zip(got, expected, strict=True):
        _check_same(one, other)
    assert len(expected) > 4
    assert sum(taken.tables.n_spans for taken in got if taken.tables) == 3 * 38
    assert there.n_requests == here.n_requests == 2
    assert {path.read_bytes() for path in (tmp_path / "there").iterdir()} == {BROKEN}
    assert [record.levelno for record in caplog.records if "cannot be stored" in record.message] == [logging.ERROR]
    assert process.peak_bytes > 2**24
    process.close()
    journal.close()


def _check_same(one: ReadyBatch, other: ReadyBatch) -> None:
    assert one.tables is not None
    assert other.tables is not None
    for name in ("spans", "logs", "evaluations", "n_duplicates"):
        assert getattr(one.tables, name) == getattr(other.tables, name), name
    for name in Tally.__slots__:
        assert getattr(one.tables.tally, name) == getattr(other.tables.tally, name), name


def test_its_end_is_reported_at_the_next_request(journal: Journal, tmp_path: Path) -> None:
    process = BatcherProcess(journal, PendingBatch.after(START), Quarantine(tmp_path / "q"), max_bytes=12_000)
    process.fill()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(BatcherProcessError, match="ended with code -9"):
        process.next_batch()
    process.close()
    journal.close()


def _send_until_it_runs(collector: CollectorProcess, number: int) -> tuple[int, int]:
    """Sends spans until the row process runs; returns its id, and the number of the last span sent."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for _ in range(20):
            number += 1
            export(collector.address, span(1, number, CALL, events=[REWARD]))
        export_logs(collector.address, LogRecord(body=any_value(f"until {number}")))
        if children := collector.batcher_processes():
            return children[0], number
    raise AssertionError("no process makes rows")


def test_killed_under_load_it_takes_nothing_along(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", load_max_bytes=20_000, load_interval_s=0.2) as collector:
        pid, number = _send_until_it_runs(collector, 0)
        os.kill(pid, signal.SIGKILL)
        for _ in range(100):
            number += 1
            export(collector.address, span(1, number, CALL, events=[REWARD]))
        query = "SELECT span_id FROM spans"
        found = Counter(int(span_id, 16) for (span_id,) in select(collector.address, query))
        assert found == Counter(range(1, number + 1))
        assert select(collector.address, "SELECT count(*) FROM evaluations") == [(number,)]
        [(records,)] = select(collector.address, "SELECT count(*) FROM logs")
        assert records >= 1
        assert collector.batcher_processes() == []
        assert collector.terminate() == 0
        assert collector.process.stderr is not None
        assert "rows are made in the collector's own process" in collector.process.stderr.read()


@pytest.mark.ci
@pytest.mark.skipif(find_spec("pandas") is None, reason="pandas is not installed")
def test_neither_process_loads_pandas(tmp_path: Path) -> None:
    with running(tmp_path / "s.duckdb", load_max_bytes=20_000, load_interval_s=0.2) as collector:
        pid, last = _send_until_it_runs(collector, 0)
        sent = last
        while select(collector.address, "SELECT count(*) FROM spans") != [(sent,)] or sent < last + 40:
            sent += 1
            export(collector.address, span(1, sent, CALL))
        for each in (pid, collector.process.pid):
            libraries = Path(f"/proc/{each}/maps").read_text()
            assert "pyarrow" in libraries
            assert "pandas" not in libraries


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_collector(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path / "s.duckdb", load_max_bytes=20_000, load_interval_s=0.2) as collector:
        pid, last = _send_until_it_runs(collector, 0)
        os.kill(pid, signal.SIGTERM)  # as sent by a terminal or systemd
        os.kill(pid, signal.SIGINT)
        export(collector.address, span(1, last + 1))
        assert select(collector.address, "SELECT count(*) FROM spans") == [(last + 1,)]
        assert collector.batcher_processes() == [pid]
        collector.process.send_signal(number)
        collector.process.wait(60)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "it continues"
            time.sleep(0.01)
    with running(tmp_path / "s.duckdb") as again:
        query = f"SELECT count(*), count(DISTINCT span_id) FROM spans WHERE trace_id = '{trace_id(1).hex()}'"
        assert select(again.address, query) == [(last + 1, last + 1)]

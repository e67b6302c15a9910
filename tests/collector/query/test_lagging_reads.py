"""A store that has not loaded all it acknowledged: reads report it, no partial dataset is built, senders are slowed."""

import itertools
import math
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.collector.faults import hanging_loader, slow_loader, small_disk
from tests.support.collector.process import (
    ANY_PORT,
    TRACES,
    CollectorProcess,
    channel,
    export,
    get,
    running,
    span,
    trace_request,
)
from tests.support.otlp.http import request
from trainspan_cli.doctor.capture_checks import backlog_findings
from trainspan_collector.journal.backlog import Backlog
from trainspan_collector.journal.frames import HEADER_BYTES, Signal
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import Position
from trainspan_processing.read import source
from trainspan_processing.read.source import Selection, Source
from trainspan_schemas.errors import StoreError

MIB = 2**20


@pytest.fixture
def lagging(tmp_path: Path) -> Iterator[CollectorProcess]:
    """A collector that acknowledged two spans and has loaded neither."""
    collector = CollectorProcess(tmp_path / "spans.duckdb", faults=hanging_loader(tmp_path / "faults"))
    export(collector.address, span(1, 1), span(1, 2))
    yield collector
    collector.kill()


def test_a_wait_that_is_over_gives_what_is_there_and_how_far_it_came(lagging: CollectorProcess) -> None:
    table = get(lagging.address, {"read": "spans", "wait_ms": 200})
    assert table.num_rows == 0
    assert table.schema.metadata == {b"watermark": b"0", b"behind": b"true"}


def test_a_dataset_is_refused_unless_it_is_allowed_to_be_behind(
    lagging: CollectorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "WAIT_MS", 200)
    for allow_behind in (False, True):
        with Source([str(lagging.store)], allow_behind=allow_behind) as opened:
            rows = opened.read("spans", Selection(), ["seq"])
            if allow_behind:
                assert sum(frame.height for frame in rows) == 0
            else:
                with pytest.raises(StoreError, match="not loaded all acknowledged data"):
                    list(rows)


def test_doctor_calls_it_a_problem_if_nothing_is_loaded(lagging: CollectorProcess) -> None:
    [finding] = backlog_findings(str(lagging.store))
    assert (finding.level, finding.subject) == ("problem", "loading")
    assert "nothing was loaded yet" in finding.detail


@pytest.mark.slow
def test_senders_are_slowed_before_the_backlog_reaches_the_floor_of_free_disk(tmp_path: Path) -> None:
    """Intake is many times faster than loading at 4 MiB/s; 416 MiB of disk are left above the floor."""
    limits = {
        "min_free_disk_bytes": 96 * MIB,
        "load_interval_s": 0.1,
        "load_max_bytes": 4 * MIB,
        "overload_wait_s": 0.2,
    }
    faults = slow_loader(tmp_path / "faults", batch_s=1.0)
    refusals: list[str] = []
    with (
        small_disk(tmp_path / "disk", size_mib=512) as disk,
        running(disk / "spans.duckdb", faults=faults, http=ANY_PORT, checkpoint_bytes=MIB, **limits) as collector,
        channel(collector.address) as opened,
    ):
        numbers, deadline = itertools.count(1), time.monotonic() + 120
        while len(refusals) < 3 and time.monotonic() < deadline:
            spans = (span(1, number, {"text": "x" * 200_000}) for number in itertools.islice(numbers, 20))
            try:
                opened.unary_unary(TRACES)(trace_request(*spans).SerializeToString(), timeout=20)
            except grpc.RpcError as error:
                refusals.append(str(error.details()))
        assert all(text.startswith("requests arrive faster than they are loaded, and ") for text in refusals), refusals
        assert len(refusals) == 3
        assert shutil.disk_usage(disk).free > 106 * MIB
        assert _backlog_s(collector) > 5
        collector.kill()  # loading everything takes a minute


def test_the_pace_falls_from_twice_the_rate_of_loading_to_none(tmp_path: Path) -> None:
    now = 0.0
    journal = Journal(tmp_path)
    loaded = Position(1, 0)
    frame = HEADER_BYTES + 100
    backlog = Backlog(journal, lambda: loaded, least_bytes=frame, clock=lambda: now)
    for _ in range(100):
        journal.append(Signal.TRACES, bytes(100), 1)
    assert backlog.turn(1, 1, limit_s=1) == 0  # nothing loaded yet: the rate is unknown
    for second in range(1, 61):
        now, loaded = float(second), Position(1, second * frame)  # one per second
        backlog.seconds()
    assert backlog.seconds() == pytest.approx(40)
    left = 40 * frame

    def pace(room_bytes: int) -> float:
        """Requests per second."""
        nonlocal now
        now += 1000  # no turn is pending
        backlog._bytes_per_s, backlog._looked = frame, now
        assert backlog.turn(frame, room_bytes, limit_s=1) == 0
        waits = backlog.turn(frame, room_bytes, limit_s=0)  # not taken: too far away
        assert backlog.turn(frame, room_bytes, limit_s=1000) == waits
        return 1 / waits if waits else math.inf

    assert pace(2 * left) == math.inf
    assert pace(left) == pytest.approx(2)
    assert pace(left * 3 // 5) == pytest.approx(1, rel=0.01)
    assert pace(left * 3 // 7) == pytest.approx(0.4, rel=0.01)
    assert pace(left * 1001 // 3000) == 0.2  # turns last at most 5 s, to follow a pace that rises again
    now += 1000
    backlog._looked = now
    assert [backlog.turn(frame, 0, limit_s=1) for _ in range(2)] == [2, 2]
    assert backlog.turn(frame, left // 2, limit_s=1) == 0
    journal.close()


def _backlog_s(collector: CollectorProcess) -> float:
    page = request(collector.address, "/metrics", method="GET", content_type=None).body.decode()
    [found] = re.findall(r"^trainspan_collector_backlog_seconds (\S+)$", page, re.MULTILINE)
    return float(found)

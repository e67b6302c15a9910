"""Full, slow or faulty disks, and clocks that jump: nothing acknowledged is lost, and senders get correct answers."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pyarrow import flight

from tests.support.collector.faults import grow, jumping_clock, slow_disk, small_disk
from tests.support.collector.process import (
    TRACES,
    CollectorProcess,
    channel,
    export,
    get,
    read,
    running,
    select,
    span,
    trace_request,
)
from trainspan_collector.journal.frames import Signal, encode_header
from trainspan_schemas.store.access import running_collector

MIB = 2**20


def _text(seed: int, n_bytes: int) -> str:
    return random.Random(seed).randbytes(n_bytes // 2).hex()


def _send_until(collector: CollectorProcess, first: int, n_refused: int) -> tuple[list[int], list[grpc.RpcError]]:
    """Exports spans of 200 kB, numbered from `first`, until `n_refused` fail; returns the acknowledged and errors."""
    acknowledged: list[int] = []
    refusals: list[grpc.RpcError] = []
    with channel(collector.address) as opened:
        for number in range(first, first + 5_000):
            body = trace_request(span(1, number, {"text": _text(number, 200_000)})).SerializeToString()
            try:
                opened.unary_unary(TRACES)(body, timeout=20)
            except grpc.RpcError as error:
                refusals.append(error)
                if len(refusals) == n_refused:
                    return acknowledged, refusals
            else:
                acknowledged.append(number)
    raise AssertionError("the disk was never full")


def _assert_asks_to_come_back(refusals: list[grpc.RpcError]) -> None:
    for error in refusals:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert RetryInfo.FromString(dict(error.trailing_metadata())["google.rpc.retryinfo-bin"]).retry_delay.seconds > 0


def _numbers(collector: CollectorProcess) -> list[int]:
    return [int(row["span_id"], 16) for row in read(collector.address, "spans", columns=["seq", "span_id"])]


def test_on_a_full_disk_senders_retry_and_with_room_again_everything_continues(tmp_path: Path) -> None:
    limits = {"min_free_disk_bytes": 0, "load_interval_s": 0.05, "overload_wait_s": 0.1}
    with (
        small_disk(tmp_path / "disk", size_mib=24) as disk,
        running(disk / "spans.duckdb", **limits) as collector,
    ):
        acknowledged, refusals = _send_until(collector, 1, n_refused=20)
        _assert_asks_to_come_back(refusals)
        assert len(acknowledged) > 20
        grow(disk, size_mib=200)
        while not _exported(collector, [span(1, 9_999)]):
            time.sleep(0.2)
        assert _numbers(collector) == [*acknowledged, 9_999]
        assert collector.process.poll() is None


@pytest.mark.ci
def test_a_crash_on_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mib=24) as disk:
        collector = CollectorProcess(disk / "spans.duckdb", min_free_disk_bytes=0, overload_wait_s=0.1)
        acknowledged, _ = _send_until(collector, 1, n_refused=3)
        collector.kill()
        grow(disk, size_mib=200)
        with running(disk / "spans.duckdb") as again:
            assert _numbers(again) == acknowledged
            table = get(again.address, {"read": "spans", "parameters": {"columns": ["seq"]}})
            assert table.schema.metadata[b"behind"] == b"false"


def test_above_the_floor_of_free_disk_there_is_room_to_load_so_that_a_burst_is_taken_in_the_end(tmp_path: Path) -> None:
    limits = {"min_free_disk_bytes": 64 * MIB, "load_interval_s": 0.05, "overload_wait_s": 0.1}
    with (
        small_disk(tmp_path / "disk", size_mib=96) as disk,
        running(disk / "spans.duckdb", checkpoint_bytes=MIB, **limits) as collector,
    ):
        acknowledged, refusals = _send_until(collector, 1, n_refused=3)
        _assert_asks_to_come_back(refusals)
        assert "bytes of disk are free" in refusals[0].details()
        assert _numbers(collector) == acknowledged


@pytest.mark.ci
def test_many_senders_share_the_syncs_of_a_slow_disk_and_a_crash_loses_no_answer_of_it(tmp_path: Path) -> None:
    faults = slow_disk(tmp_path / "faults", sync_s=0.2, mib_per_s=50)
    collector = CollectorProcess(tmp_path / "spans.duckdb", faults=faults)
    acknowledged: list[int] = []

    def send(start: int) -> None:
        with contextlib.suppress(grpc.RpcError):
            for number in range(start, start + 10_000):
                export(collector.address, span(1, number))
                acknowledged.append(number)

    senders = [threading.Thread(target=send, args=(1 + 10_000 * index,)) for index in range(8)]
    for sender in senders:
        sender.start()
    time.sleep(2.5)
    collector.kill()
    for sender in senders:
        sender.join()
    # About ten syncs of 0.2 s: one answer each if senders had to wait in turn.
    assert len(acknowledged) > 24
    with running(tmp_path / "spans.duckdb") as again:
        stored = _numbers(again)
        assert set(acknowledged) <= set(stored)
        assert len(stored) == len(set(stored)) <= len(acknowledged) + 8


TAILS: dict[str, Callable[[bytes], bytes]] = {
    "a request cut short": lambda whole: whole + whole[: len(whole) // 4],
    "zeros": lambda whole: whole + bytes(5_000),
    "noise": lambda whole: whole + random.Random(1).randbytes(5_000),
    "a header that promises two gigabytes": lambda whole: whole + whole[:12] + b"\xff\xff\xff\x7f" + whole[16:28],
}


@pytest.mark.ci
@pytest.mark.parametrize("tail", TAILS)
def test_a_corrupt_tail_of_the_journal_costs_nothing_acknowledged_and_is_named(tmp_path: Path, tail: str) -> None:
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store, load_interval_s=30)
    export(collector.address, span(1, 1))
    export(collector.address, span(1, 2))
    collector.kill()
    [journal] = store.with_name(store.name + ".journal").glob("*.journal")
    journal.write_bytes(TAILS[tail](journal.read_bytes()))
    with running(store, log="WARNING") as again:
        export(again.address, span(1, 3))
        assert _numbers(again) == [1, 2, 3]
        assert "journal damage" in _last_words(again)


def test_what_looks_like_a_request_within_a_torn_one_is_none(tmp_path: Path) -> None:
    """An agent that knows the format embeds requests in its own text, hoping for a crash."""
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store, load_interval_s=30)
    export(collector.address, span(1, 1))
    [journal] = store.with_name(store.name + ".journal").glob("*.journal")
    body = trace_request(span(1, 666, {"paid": 1e6})).SerializeToString()
    embedded = random.Random(3).randbytes(8) + encode_header(Signal.TRACES, 1, body) + body
    whole = journal.stat().st_size
    export(collector.address, span(1, 2, {"text": embedded + bytes(100)}))
    collector.kill()
    data = journal.read_bytes()
    assert embedded in data[whole:]
    journal.write_bytes(data[:-20])
    with running(store) as again:
        assert _numbers(again) == [1]


def test_a_damaged_write_ahead_log_is_named_kept_and_loaded_again_from_the_journal(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store)
    for number in (1, 2):
        export(collector.address, span(1, number, {"text": "x" * 5_000}))
        assert len(read(collector.address, "spans")) == number  # committed, hence in the write-ahead log
    collector.kill()
    wal = store.with_name(store.name + ".wal")
    data = bytearray(wal.read_bytes())
    data[len(data) // 4] ^= 0xFF
    wal.write_bytes(data)
    with running(store) as again:
        export(again.address, span(1, 3))
        assert _numbers(again) == [1, 2, 3]
        [kept] = tmp_path.glob("spans.duckdb.wal.damaged-*")
        assert kept.read_bytes() == data
        assert f"write-ahead log damaged kept_as={kept}" in _last_words(again)


@pytest.mark.slow
def test_a_write_ahead_log_with_any_byte_flipped_or_cut_anywhere_loses_nothing(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store)
    for number in range(1, 6):
        export(collector.address, span(1, number, {"text": "x" * 2_000}))
        assert len(read(collector.address, "spans")) == number
    collector.kill()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    wal = store.with_name(store.name + ".wal")
    places = random.Random(5)
    for _ in range(40):
        for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
            path.unlink()
        for path, content in files.items():
            path.write_bytes(content)
            path.chmod(0o600)
        data = bytearray(files[wal])
        place = places.randrange(len(data))
        if places.random() < 0.5:
            data[place] ^= 1 << places.randrange(8)
        else:
            del data[place:]
        wal.write_bytes(data)
        with running(store) as again:
            assert _numbers(again) == [1, 2, 3, 4, 5]


def _last_words(collector: CollectorProcess) -> str:
    """Ends the collector; returns its stderr."""
    assert collector.terminate() == 0
    assert collector.process.stderr is not None
    return collector.process.stderr.read()


def test_a_clock_that_jumps_years_back_and_forth_loses_and_reorders_nothing(tmp_path: Path) -> None:
    faults = jumping_clock(tmp_path / "faults")
    year_s = 365 * 86_400
    with running(tmp_path / "spans.duckdb", faults=faults, load_interval_s=0.05) as collector:
        for number, offset_s in enumerate((0, 10 * year_s, -40 * year_s, 0), start=1):
            (faults / "offset_s").write_text(str(offset_s))
            export(collector.address, span(1, number))
            assert _numbers(collector) == list(range(1, number + 1))
        collector.kill()
    with running(tmp_path / "spans.duckdb", faults=faults) as again:
        assert _numbers(again) == [1, 2, 3, 4]


@pytest.mark.ci
def test_a_row_group_larger_than_the_memory_limit_makes_the_store_open_again_with_more(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", duckdb_memory_bytes=12 * MIB, load_interval_s=0.05) as collector:
        for trace in range(1, 5):
            texts = [_text(trace * 100 + number, 2_000_000) for number in range(10)]
            spans = [span(trace, number, {"text": text}) for number, text in enumerate(texts, start=1)]
            while not _exported(collector, spans):
                time.sleep(0.2)
        deadline = time.monotonic() + 60
        stored: list[tuple[int, int]] = []
        while stored != [(40, 40)] and time.monotonic() < deadline:
            with contextlib.suppress(flight.FlightError):  # unreachable while it reopens
                stored = select(collector.address, "SELECT count(*), count(DISTINCT (trace_id, span_id)) FROM spans")
            time.sleep(0.1)
        assert stored == [(40, 40)]
        assert running_collector(collector.store) == collector.address  # the same process on the same ports
        export(collector.address, span(9, 1))
        assert "reopening the store" in _last_words(collector)


def _exported(collector: CollectorProcess, spans: list[Span]) -> bool:
    try:
        export(collector.address, *spans)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return False
        raise
    return True

"""kill -9 at any moment: every acknowledged span is there, once."""

import contextlib
import random
import resource
import threading
import time
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pyarrow import flight

from tests.support.collector import (
    TRACES,
    CollectorProcess,
    channel,
    export,
    read,
    running,
    select,
    span,
    trace_request,
)
from trainspan_schemas.store import running_collector

BYTES_PER_SPAN = 2_000


class Client:
    """Sends requests of five spans over one connection; what got no answer is sent again, as exporters do."""

    def __init__(self, trace: int) -> None:
        self.trace = trace
        self.acknowledged: set[int] = set()
        self.n_sent = 0
        self._unanswered: list[int] = []

    def send_until_killed(self, collector: CollectorProcess) -> None:
        with channel(collector.address) as opened:
            call = opened.unary_unary(TRACES)
            while True:
                numbers = self._unanswered or list(range(self.n_sent + 1, self.n_sent + 6))
                self._unanswered = numbers
                self.n_sent = max(self.n_sent, numbers[-1])
                text = random.Random(numbers[0]).randbytes(BYTES_PER_SPAN // 2).hex()
                body = trace_request(*(span(self.trace, number, {"text": text}) for number in numbers))
                try:
                    call(body.SerializeToString(), timeout=10)
                except grpc.RpcError:
                    return
                self.acknowledged.update(numbers)
                self._unanswered = []


def _run_and_kill(store: Path, clients: list[Client], n_kills: int, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(n_kills):
        # Small limits, so that kills meet loads, checkpoints and journal files being deleted.
        collector = CollectorProcess(store, load_interval_s=0.05, load_max_bytes=200_000, checkpoint_bytes=1_000_000)
        threads = [threading.Thread(target=client.send_until_killed, args=(collector,)) for client in clients]
        for thread in threads:
            thread.start()
        time.sleep(moments.uniform(0.05, 0.8))
        collector.kill()
        for thread in threads:
            thread.join()


def _assert_all_there_once(store: Path, clients: list[Client]) -> None:
    with running(store) as collector:
        for client in clients:
            query = f"SELECT span_id FROM spans WHERE trace_id = '{client.trace:032x}'"
            stored = [int(span_id, 16) for (span_id,) in select(collector.address, query)]
            assert len(stored) == len(set(stored))
            assert client.acknowledged <= set(stored)
            assert set(stored) <= set(range(1, client.n_sent + 1))
            assert len(client.acknowledged) > 50


def test_five_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    clients = [Client(trace) for trace in (1, 2, 3)]
    _run_and_kill(tmp_path / "spans.duckdb", clients, n_kills=5, seed=time.time_ns())
    _assert_all_there_once(tmp_path / "spans.duckdb", clients)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    clients = [Client(trace) for trace in (1, 2, 3, 4)]
    _run_and_kill(tmp_path / "spans.duckdb", clients, n_kills=100, seed=time.time_ns())
    _assert_all_there_once(tmp_path / "spans.duckdb", clients)


def _journal_files(store: Path) -> list[Path]:
    return sorted(store.with_name(store.name + ".journal").glob("*.journal"))


def test_a_torn_tail_after_the_acknowledged_requests_costs_nothing(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store, load_interval_s=30)
    export(collector.address, span(1, 1))
    export(collector.address, span(1, 2))
    collector.kill()
    [journal] = _journal_files(store)
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[: len(whole) // 4])  # a request that was being written
    with running(store) as again:
        export(again.address, span(1, 3))
        assert [row["span_id"] for row in read(again.address, "spans")] == [f"{number:016x}" for number in (1, 2, 3)]


def test_a_damaged_write_ahead_log_is_loaded_again_from_the_journal(tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    collector = CollectorProcess(store)
    for number in (1, 2):
        export(collector.address, span(1, number, {"text": "x" * 5_000}))
        assert len(read(collector.address, "spans")) == number  # committed, so in the write-ahead log
    collector.kill()
    wal = store.with_name(store.name + ".wal")
    data = bytearray(wal.read_bytes())
    data[len(data) // 4] ^= 0xFF
    wal.write_bytes(data)
    with running(store) as again:
        export(again.address, span(1, 3))
        assert [row["span_id"] for row in read(again.address, "spans")] == [f"{number:016x}" for number in (1, 2, 3)]
    assert len(list(tmp_path.glob("spans.duckdb.wal.damaged-*"))) == 1


def test_spans_too_large_for_the_memory_limit_make_the_store_open_again_with_more(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", duckdb_memory_bytes=64 * 2**20, load_interval_s=0.05) as collector:
        for trace in range(1, 5):
            texts = [random.Random(trace * 100 + number).randbytes(1_000_000).hex() for number in range(20)]
            spans = [span(trace, number, {"text": text}) for number, text in enumerate(texts, start=1)]
            while not _exported(collector, spans):
                time.sleep(0.2)
        deadline = time.monotonic() + 60
        stored: list[tuple[int, int]] = []
        while stored != [(80, 80)] and time.monotonic() < deadline:
            with contextlib.suppress(flight.FlightError):  # out of reach while it opens again
                stored = select(collector.address, "SELECT count(*), count(DISTINCT (trace_id, span_id)) FROM spans")
            time.sleep(0.1)
        assert stored == [(80, 80)]
        assert running_collector(collector.store) == collector.address  # the same process on the same ports
        export(collector.address, span(9, 1))
        assert collector.terminate() == 0
        assert collector.process.stderr is not None
        assert "opening the store again" in collector.process.stderr.read()


def _exported(collector: CollectorProcess, spans: list[Span]) -> bool:
    try:
        export(collector.address, *spans)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return False
        raise
    return True


def test_a_full_disk_is_told_to_senders_and_when_there_is_room_again_all_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", load_interval_s=0.05, overload_wait_s=0.1) as collector:
        process, unlimited = collector.process.pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (1_200_000, resource.RLIM_INFINITY))  # DuckDB's file is 1.1 MB
        acknowledged, refusals = [], []
        for number in range(1, 80):
            text = random.Random(number).randbytes(20_000).hex()
            try:
                export(collector.address, span(1, number, {"text": text}))
            except grpc.RpcError as error:
                refusals.append(error.code())
            else:
                acknowledged.append(number)
        assert set(refusals) == {grpc.StatusCode.UNAVAILABLE}
        resource.prlimit(process, resource.RLIMIT_FSIZE, unlimited)
        export(collector.address, span(1, 100))
        stored = [int(row["span_id"], 16) for row in read(collector.address, "spans")]
        assert stored == [*acknowledged, 100]

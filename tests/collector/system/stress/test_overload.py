"""Clients that send more than the disk can take: bounded memory, proper refusals, no data loss, no collapse."""

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo

from tests.support.collector.faults import slow_disk
from tests.support.collector.process import TRACES, CollectorProcess, channel, running, select, span, trace_request

MIB = 2**20
DISK_MIB_PER_S = 12
INFLIGHT_BYTES = 16 * MIB
SPANS = 16
SPAN_BYTES = 64 * 1024  # requests of one MiB


@dataclass
class Sender:
    """Sends one request after another; retries a refused one after a moment, as exporters do."""

    number: int
    acknowledged: int = 0
    refusals: list[grpc.RpcError] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, collector: CollectorProcess, stop: threading.Event) -> None:
        text = random.Random(self.number).randbytes(SPAN_BYTES // 2).hex()
        with channel(collector.address) as opened:
            export = opened.unary_unary(TRACES)
            while not stop.is_set():
                first = 1 + self.acknowledged * SPANS
                spans = (span(self.number, first + index, {"text": text}) for index in range(SPANS))
                body = trace_request(*spans).SerializeToString()
                while not stop.is_set():
                    began = time.monotonic()
                    try:
                        export(body, timeout=60)
                    except grpc.RpcError as error:
                        self.refusals.append(error)
                        time.sleep(0.05)
                    else:
                        self.acknowledged += 1
                        self.seconds.append(time.monotonic() - began)
                        break


def _send(collector: CollectorProcess, senders: list[Sender], seconds: float) -> tuple[float, list[int]]:
    """Acknowledged requests per second, and the collector's resident memory in MiB twice a second."""
    stop = threading.Event()
    before = sum(sender.acknowledged for sender in senders)
    threads = [threading.Thread(target=sender.run, args=(collector, stop)) for sender in senders]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    resident = []
    while time.monotonic() - began < seconds:
        time.sleep(0.5)
        resident.append(_resident_mib(collector))
    per_s = (sum(sender.acknowledged for sender in senders) - before) / (time.monotonic() - began)
    stop.set()
    for thread in threads:
        thread.join()
    return per_s, resident


def _resident_mib(collector: CollectorProcess) -> int:
    lines = Path(f"/proc/{collector.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


@pytest.mark.ci
@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_forty_senders_on_a_slow_disk_are_refused_in_turn_and_take_no_more_memory_with_time(
    tmp_path: Path, seconds: float
) -> None:
    faults = slow_disk(tmp_path / "faults", sync_s=0.002, mib_per_s=DISK_MIB_PER_S)
    limits = {"max_inflight_bytes": INFLIGHT_BYTES, "overload_wait_s": 0.5, "load_interval_s": 0.5}
    with running(tmp_path / "spans.duckdb", faults=faults, **limits) as collector:
        few = [Sender(number) for number in range(1, 5)]
        peak_per_s, _ = _send(collector, few, max(3.0, seconds / 6))
        many = [Sender(number) for number in range(11, 51)]  # forty MiB in flight, with room for sixteen
        full_per_s, resident = _send(collector, many, seconds)
        assert not [error for sender in few for error in sender.refusals]
        refusals = [error for sender in many for error in sender.refusals]
        assert len(refusals) > len(many)
        for error in refusals:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            retry = RetryInfo.FromString(dict(error.trailing_metadata())["google.rpc.retryinfo-bin"])
            assert retry.retry_delay.seconds > 0
        assert full_per_s >= 0.8 * peak_per_s
        assert max(resident) < 600  # 160 at start, DuckDB's 144, the budget, forty requests in gRPC's hands, a batch
        if seconds >= 60:  # after the first seconds, while caches fill
            assert max(resident[-40:]) - max(resident[20:60]) < 48
        query = "SELECT trace_id, count(*), count(DISTINCT span_id) FROM spans GROUP BY ALL"
        stored = {int(trace, 16): (n_rows, n_spans) for trace, n_rows, n_spans in select(collector.address, query)}
        for sender in [*few, *many]:
            n_rows, n_spans = stored.get(sender.number, (0, 0))
            assert n_rows == n_spans
            assert sender.acknowledged * SPANS <= n_spans <= (sender.acknowledged + 1) * SPANS

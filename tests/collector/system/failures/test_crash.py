"""kill -9 at any moment, including startup: every acknowledged span, log record and evaluation is stored once."""

import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.support.collector.process import (
    ANY_PORT,
    LOGS,
    TRACES,
    CollectorProcess,
    channel,
    event,
    key_values,
    running,
    select,
    span,
    spawn_collector,
    trace_id,
    trace_request,
)
from trainspan_schemas.telemetry import keys

# Small limits, so that kills meet loads, checkpoints and journal files being deleted.
SMALL = {"http": ANY_PORT, "load_interval_s": 0.05, "load_max_bytes": 60_000, "checkpoint_bytes": 1_000_000}

ENOUGH = 50
"""Spans and log records that each client must have got acknowledged at least."""


@dataclass
class Client:
    """Sends five spans, then five log records, and so on over one connection; resends whatever got no answer."""

    trace: int
    acknowledged: dict[str, set[int]] = field(default_factory=lambda: {TRACES: set(), LOGS: set()})
    n_sent: int = 0
    _unanswered: tuple[str, list[int]] | None = None

    def send_until_refused(self, collector: CollectorProcess) -> None:
        with channel(collector.address) as opened:
            while True:
                method, numbers = self._unanswered or self._next()
                self._unanswered = method, numbers
                body = self._spans(numbers) if method == TRACES else self._records(numbers)
                try:
                    opened.unary_unary(method)(body, timeout=10)
                except grpc.RpcError:
                    return
                self.acknowledged[method].update(numbers)
                self._unanswered = None

    def _next(self) -> tuple[str, list[int]]:
        numbers = list(range(self.n_sent + 1, self.n_sent + 6))
        self.n_sent = numbers[-1]
        return (TRACES if numbers[-1] % 10 == 5 else LOGS), numbers

    def _spans(self, numbers: list[int]) -> bytes:
        text = random.Random(numbers[0]).randbytes(1_000).hex()
        reward = [event(keys.EVALUATION_EVENT, {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1})]
        spans = (span(self.trace, number, {"text": text}, events=reward) for number in numbers)
        return trace_request(*spans).SerializeToString()

    def _records(self, numbers: list[int]) -> bytes:
        request = ExportLogsServiceRequest()
        request.resource_logs.add().scope_logs.add().log_records.extend(
            LogRecord(
                trace_id=trace_id(self.trace),
                event_name=keys.EVALUATION_EVENT,
                attributes=key_values(
                    {"number": number, keys.EVALUATION_NAME: "style", keys.EVALUATION_LABEL: str(number)}
                ),
            )
            for number in numbers
        )
        return request.SerializeToString()


def _run_and_stop(store: Path, clients: list[Client], n_stops: int, seed: int) -> None:
    """Stops it so often, and more often if by then a client has hardly got an answer."""
    moments = random.Random(seed)
    for n in itertools.count():
        if n >= n_stops and all(
            len(numbers) > ENOUGH for client in clients for numbers in client.acknowledged.values()
        ):
            return
        assert n < 10 * n_stops
        if moments.random() < 0.2:  # during startup, while it reads its predecessor's journal
            starting = spawn_collector(store, **SMALL)
            time.sleep(moments.uniform(0.2, 0.7))
            starting.kill()
            starting.wait()
            continue
        collector = CollectorProcess(store, **SMALL)
        threads = [threading.Thread(target=client.send_until_refused, args=(collector,)) for client in clients]
        for thread in threads:
            thread.start()
        time.sleep(moments.uniform(0.05, 0.8))
        if moments.random() < 0.3:
            for pid in collector.batcher_processes():
                os.kill(pid, signal.SIGKILL)
            time.sleep(moments.uniform(0, 0.2))
        collector.process.send_signal(signal.SIGTERM if moments.random() < 0.1 else signal.SIGKILL)
        collector.process.wait(60)
        for thread in threads:
            thread.join()


def _assert_all_there_once(store: Path, clients: list[Client]) -> None:
    with running(store) as collector:
        for client in clients:
            of_trace = f"WHERE trace_id = '{trace_id(client.trace).hex()}'"
            spans = select(collector.address, f"SELECT span_id FROM spans {of_trace}")
            logs = select(collector.address, f"SELECT (attributes->>'number')::INTEGER FROM logs {of_trace}")
            rewards = select(
                collector.address, f"SELECT span_id FROM evaluations {of_trace} AND name = 'reward' AND score = 1"
            )
            styles = select(collector.address, f"SELECT label::INTEGER FROM evaluations {of_trace} AND name = 'style'")
            _assert_once([int(span_id, 16) for (span_id,) in spans], client.acknowledged[TRACES], client.n_sent)
            _assert_once([number for (number,) in logs], client.acknowledged[LOGS], client.n_sent)
            assert sorted(rewards) == sorted(spans)
            assert sorted(styles) == sorted(logs)


def _assert_once(stored: list[int], acknowledged: set[int], n_sent: int) -> None:
    assert len(stored) == len(set(stored))
    assert acknowledged <= set(stored) <= set(range(1, n_sent + 1))
    assert len(acknowledged) > ENOUGH


@pytest.mark.ci
def test_eight_stops_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    def stop_four_times(name: str) -> None:
        clients = [Client(trace) for trace in (1, 2, 3)]
        _run_and_stop(tmp_path / name, clients, n_stops=4, seed=hash((name, time.time_ns())))
        _assert_all_there_once(tmp_path / name, clients)

    with ThreadPoolExecutor() as pool:
        list(pool.map(stop_four_times, ("one.duckdb", "two.duckdb")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_and_thirty_stops_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    clients = [Client(trace) for trace in (1, 2, 3, 4)]  # more than 100 kills are under load or at startup
    _run_and_stop(tmp_path / "spans.duckdb", clients, n_stops=130, seed=time.time_ns())
    _assert_all_there_once(tmp_path / "spans.duckdb", clients)

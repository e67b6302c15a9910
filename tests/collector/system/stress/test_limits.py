"""Hostile senders and readers against a real collector: bounded memory, bounded time, and other clients unaffected."""

import contextlib
import gzip
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pyarrow import flight

from tests.support.collector.process import (
    ANY_PORT,
    TRACES,
    CollectorProcess,
    call_options,
    export,
    get,
    running,
    select,
    send,
    span,
    span_id,
    trace_id,
    trace_request,
)
from tests.support.otlp.http import JSON, request

pytestmark = pytest.mark.ci

MIB = 2**20
BODY = trace_request(span(1, 1)).SerializeToString()
AGENT, RUNNER, SERVING = (f"{role}-token-{'x' * 20}" for role in ("agent", "runner", "serving"))


def _resident_mib(collector: CollectorProcess, field: str = "VmHWM") -> int:
    lines = Path(f"/proc/{collector.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(f"{field}:"))


@contextlib.contextmanager
def _risen_at_most(collector: CollectorProcess, mib: int) -> Iterator[None]:
    """Checks that the collector's resident memory rises by at most `mib` within the block."""
    Path(f"/proc/{collector.process.pid}/clear_refs").write_text("5")  # resets the peak
    before = _resident_mib(collector, "VmRSS")
    yield
    assert _resident_mib(collector) - before <= mib


def _field(number: int, value: bytes) -> bytes:
    length, octets = len(value), bytearray([number << 3 | 2])
    while length >= 0x80:
        octets.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes(octets) + bytes([length]) + value


def _request_of(items: bytes) -> bytes:
    """A request with one resource, one scope and these items."""
    return _field(1, _field(2, items))


def _spans(n: int, first: int = 1) -> bytes:
    """`n` spans of 30 bytes each in one scope, built by joining bytes."""
    head = _field(1, trace_id(7))
    return b"".join(_field(2, head + _field(2, span_id(first + number))) for number in range(n))


EMPTY_SPANS = _request_of(_field(2, b"") * (10 * MIB))
EMPTY_GROUPS = _field(1, b"") * (10 * MIB)
EMPTY_ATTRIBUTES = _request_of(_field(2, _field(9, b"") * (10 * MIB)))
NESTED = _request_of(_field(2, _field(9, _field(1, b"k") + _field(2, _field(5, _field(1, b"") * (10 * MIB))))))


@pytest.mark.parametrize("body", [EMPTY_SPANS, EMPTY_GROUPS, EMPTY_ATTRIBUTES, NESTED])
def test_a_small_body_of_ten_million_empty_items_is_refused_and_takes_little_memory(
    collector: CollectorProcess, body: bytes
) -> None:
    packed = gzip.compress(body)
    assert len(packed) < 64 * 1024
    request(collector.address, "/v1/traces", BODY)
    with _risen_at_most(collector, 600):  # the 20 MiB unpacked, joined and in gRPC's hands; 1,700 when all were parsed
        answers: list[int] = []
        senders = [
            threading.Thread(
                target=lambda: answers.append(
                    request(collector.address, "/v1/traces", packed, headers={"Content-Encoding": "gzip"}).status
                )
            )
            for _ in range(3)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        assert answers == [413] * 3
        with pytest.raises(grpc.RpcError) as caught:
            send(collector.address, TRACES, body, compression=grpc.Compression.Gzip)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/logs", "/v1/metrics"])
def test_json_of_ten_million_empty_objects_is_refused_before_it_is_parsed(
    collector: CollectorProcess, path: str
) -> None:
    packed = gzip.compress(b'{"resourceSpans":[' + b"{}," * (10 * MIB) + b"{}]}")
    with _risen_at_most(collector, 200):
        headers = {"Content-Encoding": "gzip"}
        assert request(collector.address, path, packed, content_type=JSON, headers=headers).status == 413


@pytest.mark.parametrize(
    ("n_spans", "limit"),
    [(40_000, 200_000), pytest.param(1_000_000, 1_100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_a_request_of_many_tiny_spans_is_loaded_in_a_time_that_grows_with_their_number(
    tmp_path: Path, n_spans: int, limit: int
) -> None:
    with running(tmp_path / "spans.duckdb", max_request_items=limit) as collector:
        send(collector.address, TRACES, BODY)
        with _risen_at_most(collector, 400):
            began = time.monotonic()
            send(collector.address, TRACES, _request_of(_spans(n_spans)))
            while select(collector.address, "SELECT count(*) FROM spans")[0][0] < n_spans:
                assert time.monotonic() - began < 20 + n_spans / 2_500
                time.sleep(0.2)
        [(n_rows, n_ids)] = select(collector.address, "SELECT count(*), count(DISTINCT (trace_id, span_id)) FROM spans")
        assert n_rows == n_ids == n_spans + 1


def test_a_request_that_was_cut_is_stored_whole_in_order_with_its_resource_and_scope(
    collector: CollectorProcess,
) -> None:
    whole = trace_request(resource={"service.name": "first"})
    whole.resource_spans[0].scope_spans[0].scope.name = "scope"
    spans = [span(31, number, {"text": "x" * 700}, name=f"n{number}") for number in range(1, 3_001)]
    spans[1_500].span_id = b"short"
    whole.resource_spans[0].scope_spans[0].spans.extend(spans)
    whole.resource_spans[0].scope_spans.add().spans.extend(span(31, 10_000 + number) for number in range(5))
    other = whole.resource_spans.add()
    other.scope_spans.add().spans.append(span(31, 20_000, {"text": "y" * 3 * MIB}))
    answer = send(collector.address, TRACES, whole.SerializeToString())
    assert b"1 rejected" in answer
    rows = select(
        collector.address,
        f"SELECT name, service_name, scope_name FROM spans WHERE trace_id = '{trace_id(31).hex()}' ORDER BY seq",
    )
    first = [(f"n{number}", "first", "scope") for number in range(1, 3_001) if number != 1_501]
    assert rows == [*first, *[("s", "first", "")] * 5, ("s", None, "")]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    tokens = folder / "tokens.toml"
    tokens.write_text(f'agent = "{AGENT}"\nrunner = "{RUNNER}"\nserving = "{SERVING}"\n')
    tokens.chmod(0o600)
    with running(folder / "s.duckdb", "--token-file", str(tokens), http=ANY_PORT) as started:
        yield started


def test_silent_streams_of_agents_stop_neither_health_nor_the_policy_server_nor_other_agents_for_long(
    guarded: CollectorProcess,
) -> None:
    go_on = threading.Event()

    def nothing() -> Iterator[bytes]:
        go_on.wait(60)
        yield from ()

    address = str(guarded.address.grpc)
    with contextlib.ExitStack() as opened:
        opened.callback(go_on.set)
        channels = [opened.enter_context(_own_channel(address)) for _ in range(5)]
        metadata = (("authorization", f"Bearer {AGENT}"),)
        silent = [
            channel.stream_unary(TRACES).future(nothing(), metadata=metadata, timeout=60)
            for channel in channels[:4]
            for _ in range(24)
        ]
        time.sleep(0.5)
        began = time.monotonic()
        health = health_pb2_grpc.HealthStub(channels[4]).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        export_of = channels[4].unary_unary(TRACES)
        export_of(BODY, metadata=(("authorization", f"Bearer {SERVING}"),), timeout=10)
        assert time.monotonic() - began < 5
        export_of(BODY, metadata=metadata, timeout=20)  # 96 silent ones took the 64 slots for a second each
        assert time.monotonic() - began < 20
        for call in silent:
            call.cancel()


def _own_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def test_probes_need_no_token(guarded: CollectorProcess) -> None:
    for path in ("/healthz", "/readyz"):
        assert request(guarded.address, path, method="GET", headers={"authorization": None}).status == 200
    assert request(guarded.address, "/metrics", method="GET", headers={"authorization": None}).status == 401
    with grpc.insecure_channel(str(guarded.address.grpc)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
        assert next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)).status == 1


def test_idle_connections_to_flight_are_bounded_and_others_work(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb") as collector:
        host, _, port = collector.address.flight.rpartition(":")
        with contextlib.ExitStack() as idle:
            for _ in range(1_400):
                with contextlib.suppress(OSError):
                    idle.enter_context(socket.create_connection((host, int(port)), 5))
            time.sleep(0.5)
            assert len(list(Path(f"/proc/{collector.process.pid}/fd").iterdir())) < 1_200
            export(collector.address, span(1, 1))
        deadline = time.monotonic() + 20
        while True:
            try:
                assert select(collector.address, "SELECT count(*) FROM spans") == [(1,)]
                break
            except flight.FlightError:
                assert time.monotonic() < deadline
                time.sleep(0.2)


def test_a_ticket_of_200_mib_is_refused_and_takes_little_memory(collector: CollectorProcess) -> None:
    get(collector.address, {"read": "spans"})
    with _risen_at_most(collector, 100), flight.connect(f"grpc://{collector.address.flight}") as client:
        ticket = flight.Ticket(b" " * (200 * MIB))
        with pytest.raises((flight.FlightError, OSError, ValueError), match="larger than max"):
            client.do_get(ticket, call_options(collector.address)).read_all()


@pytest.fixture(scope="module")
def small_queries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector with one span, in which a query may take 200 MiB."""
    with running(tmp_path_factory.mktemp("small") / "spans.duckdb", sql_memory_bytes=200 * MIB) as started:
        export(started.address, span(1, 1))
        yield started


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT len(range(150000000))",
        "SELECT len(list(a.i || b.i)) FROM range(100000) a(i), range(100000) b(i)",
        "SELECT sum(len(repeat('x', (i % 3 + 1) * 1000000))) FROM range(1000) t(i)",
        "WITH RECURSIVE t(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM t WHERE len(s) < 5000000000) FROM t",
    ],
)
def test_a_query_that_needs_too_much_memory_is_ended_by_name(small_queries: CollectorProcess, sql: str) -> None:
    peaks: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peaks.append(_of_all_mib(small_queries))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with pytest.raises(flight.FlightServerError, match="sql_memory_bytes"):
            select(small_queries.address, sql)
    finally:
        done.set()
        watching.join()
    assert max(peaks) < 600  # the collector, the query launcher, a query's 200; 13,800 in one process
    assert select(small_queries.address, "SELECT count(*) FROM spans") == [(1,)]


def _of_all_mib(collector: CollectorProcess) -> int:
    """The proportional memory of the collector and all its child processes."""
    kib, pids = 0, [collector.process.pid]
    while pids:
        pid = pids.pop()
        with contextlib.suppress(OSError, ProcessLookupError):
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, path.read_text().split())
            found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            kib += int(found[1]) if found else 0
    return kib // 1024


def _stalled(collector: CollectorProcess, ticket: dict[str, Any]) -> "subprocess.Popen[str]":
    """A reader in a separate process that has read the first rows and reads no more."""
    program = f"""
import json, time
from pyarrow import flight
client = flight.connect("grpc://{collector.address.flight}")
options = flight.FlightCallOptions(headers={collector.address.endpoint.call_headers!r})
reader = client.do_get(flight.Ticket(json.dumps({ticket!r}).encode()), options)
reader.read_chunk()
print("reading", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    return process


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[CollectorProcess]:
    """A collector with 100 MiB of spans."""
    with running(tmp_path / "spans.duckdb", duckdb_memory_bytes=512 * MIB) as collector:
        for first in range(0, 12_800, 1_280):
            text = f"{first:08}" * 1024
            export(collector.address, *(span(1, first + number, {"t": text}) for number in range(1, 1_281)))
        yield collector


@pytest.mark.slow
def test_readers_that_take_no_rows_do_not_hold_up_the_end(filled: CollectorProcess) -> None:
    with _readers_that_take_no_rows(filled):
        export(filled.address, span(2, 1))
        began = time.monotonic()
        assert filled.terminate(60) == 0
        assert time.monotonic() - began < 45  # readers get ten seconds


@pytest.mark.slow
def test_readers_that_take_no_rows_do_not_hold_up_a_compaction(filled: CollectorProcess) -> None:
    with _readers_that_take_no_rows(filled):
        began = time.monotonic()
        with flight.connect(f"grpc://{filled.address.flight}") as client:
            [answer] = client.do_action(flight.Action("compact", b"{}"), call_options(filled.address))
        assert json.loads(answer.body.to_pybytes())["rows"]["spans"] == 12_800
        assert time.monotonic() - began < 45


@contextlib.contextmanager
def _readers_that_take_no_rows(collector: CollectorProcess) -> Iterator[None]:
    tickets: list[dict[str, Any]] = [{"read": "spans"}, {"sql": "SELECT * FROM spans"}]
    readers = [_stalled(collector, ticket) for ticket in tickets]
    try:
        yield
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:4318"}, 200),
        ({"Host": "listed.example"}, 200),
        ({"Host": "rebound.example:4318"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "x@127.0.0.1"}, 403),
        ({"Host": r"evil.example\@127.0.0.1:4318"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:4318", "Origin": "http://localhost:4318"}, 200),
    ],
)
def test_strangers_hosts_and_other_sites_pages_are_refused(
    named: CollectorProcess, headers: dict[str, str], status: int
) -> None:
    assert request(named.address, "/v1/traces", BODY, headers=headers).status == status
    assert request(named.address, "/metrics", method="GET", headers=headers).status == status


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    store = tmp_path_factory.mktemp("named") / "s.duckdb"
    with running(store, http=ANY_PORT, allowed_hosts="listed.example") as started:
        yield started

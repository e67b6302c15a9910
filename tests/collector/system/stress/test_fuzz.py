"""Tens of thousands of malformed and hostile requests: each gets the right answer, and nothing breaks.

In process, all the way from bytes to rows: ASGI application, intake, a journal on disk, Arrow tables. Fewer over real
sockets, HTTP and gRPC. hypothesis draws the seeds; a failing one is shown, and reproduces its requests.
"""

import asyncio
import gzip
import http.client
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.collector.process import (
    LOGS,
    METRICS,
    TRACES,
    CollectorProcess,
    channel,
    export,
    read,
    span,
    trace_id,
)
from tests.support.otlp.hostile import JSON, PROTOBUF, Hostile, hostile
from trainspan_collector.journal.journal import Journal
from trainspan_collector.journal.segments import Position
from trainspan_collector.network.access import Access
from trainspan_collector.otlp.signals import SIGNALS, OtlpSignal
from trainspan_collector.otlp.text_repair import repaired
from trainspan_collector.receive.admission import Admission
from trainspan_collector.receive.cutting import SMALL_BYTES
from trainspan_collector.receive.export_handler import ExportHandler
from trainspan_collector.receive.http_app import HttpApp
from trainspan_collector.receive.memory_budget import MemoryBudget
from trainspan_collector.receive.redaction import Redaction
from trainspan_collector.rows.batch import Batch
from trainspan_collector.runtime.metrics import Metrics

MAX_BYTES = 1_000_000
PER_SEED = 250
SIGNAL_OF = {f"/v1/{signal.name}": signal for signal in SIGNALS}
seeds = st.integers(0, 2**64 - 1)


class InProcess:
    """The intake without sockets."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self.journal = journal
        self._read_to = Position(0, 0)
        self.batch = Batch(0)
        exports = ExportHandler(Redaction(["text"]), Metrics(), MemoryBudget(2**30, 1), max_items=100_000)
        exports.attach(Admission(journal, folder, min_free_disk_bytes=0, wait_s=1))
        self._web = HttpApp(
            exports, access=Access({}, admits_agents=True), metrics=Metrics(), max_request_bytes=MAX_BYTES, hosts=None
        )

    async def answer_all(self, requests: list[Hostile]) -> list[tuple[int, dict[str, str], bytes]]:
        return await asyncio.gather(*(self._answer(made) for made in requests))

    async def _answer(self, made: Hostile) -> tuple[int, dict[str, str], bytes]:
        headers = [
            (b"content-type", made.content_type.encode("latin-1")),
            (b"Content-Encoding", made.encoding.encode("latin-1")),
        ]
        middle = len(made.body) // 2
        incoming = [
            {"type": "http.request", "body": made.body[:middle], "more_body": True},
            {"type": "http.request", "body": made.body[middle:], "more_body": False},
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return incoming.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": made.path, "method": made.method, "headers": headers}
        await self._web(scope, receive, send)
        start, body = sent
        return (
            start["status"],
            {name.decode(): value.decode("latin-1") for name, value in start["headers"]},
            body["body"],
        )

    def load(self) -> None:
        """Turns everything in the journal into rows and Arrow tables."""
        while True:
            entries, self._read_to = self.journal.read(self._read_to, 2**20)
            if not entries:
                break
            for entry in entries:
                self.batch.add(entry.frame)
        self.batch.tables()
        self.batch = Batch(self.batch.last_seq)


@contextmanager
def in_process(folder: Path) -> Iterator[InProcess]:
    journal = Journal(folder)
    try:
        yield InProcess(journal, folder)
    finally:
        journal.close()


def _unzipped(made: Hostile) -> bytes | None:
    """The body as decompressed by the standard library; None if it is not valid gzip."""
    if made.encoding.strip().lower() != "gzip" or not made.body:
        return made.body
    if made.body[:2] == b"\x1f\x8b" and any(byte & 0xE0 for byte in made.body[3:4]):
        return None  # RFC 1952 reserves these flags and requires an error, which the library does not raise
    try:
        return gzip.decompress(made.body)
    except (OSError, EOFError, zlib.error):
        return None


def _expected(made: Hostile) -> set[int]:
    """The allowed statuses: a single one if it can be determined independently of our code."""
    signal = SIGNAL_OF.get(made.path)
    if signal is None:
        return {405 if made.method not in ("GET", "HEAD") else 401} if made.path == "/metrics" else {404}
    if made.method != "POST":
        return {405}
    media_type = made.content_type.partition(";")[0].strip().lower()
    if media_type not in (JSON, PROTOBUF) or made.encoding.strip().lower() not in ("", "gzip", "identity"):
        return {415}
    body = _unzipped(made)
    if body is None:
        return {400, 413}  # which one depends on the position of the damage
    if len(body) > MAX_BYTES:
        return {413}
    if media_type == JSON:
        return {200, 400} if _is_json_object(body) else {400}
    crowded = {413} if len(body) > SMALL_BYTES else set()  # fields are counted before anything is parsed
    try:
        signal.request().ParseFromString(body)
    except DecodeError:
        return {200 if _is_text_alone_wrong(signal, body) else 400} | crowded
    return {200} | crowded


def _is_text_alone_wrong(signal: OtlpSignal, body: bytes) -> bool:
    """Whether the body is a message but for texts that are not UTF-8, which the collector escapes."""
    try:
        valid, n_repaired = repaired(body, cast("Any", signal.request.DESCRIPTOR))
        signal.request().ParseFromString(valid)
    except (ValueError, DecodeError):
        return False
    return n_repaired > 0


def _is_json_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body.decode()), dict)
    except (ValueError, RecursionError):
        return False


def _check(made: Hostile, status: int, headers: dict[str, str], body: bytes) -> None:
    assert status in _expected(made), (status, made, body[:300])
    if status != 200:
        in_protobuf = headers["content-type"].startswith(PROTOBUF)
        assert b'"code":' in body or in_protobuf
        if in_protobuf:
            assert Status.FromString(body).message
        assert len(body) < 2_000
        assert "retry-after" not in headers


def _fuzz(folder: Path, seed: int, statuses: Counter[int]) -> None:
    random = Random(seed)
    requests = [hostile(random) for _ in range(PER_SEED)]
    with in_process(folder / f"{seed}-{statuses.total()}") as admission:
        answers = asyncio.run(admission.answer_all(requests))
        for made, (status, headers, body) in zip(requests, answers, strict=True):
            _check(made, status, headers, body)
            statuses[status] += 1
        admission.load()


def _run(folder: Path, n_requests: int) -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=n_requests // PER_SEED, database=None)
    @given(seeds)
    def fuzz(seed: int) -> None:
        _fuzz(folder, seed, statuses)

    fuzz()
    assert statuses.total() >= n_requests
    assert set(statuses) == {200, 400, 401, 404, 405, 413, 415}
    assert min(statuses[200], statuses[400]) > n_requests / 8  # a mix of invalid and valid requests


@pytest.mark.ci
def test_ten_thousand_hostile_requests_get_the_right_answer_each(tmp_path: Path) -> None:
    _run(tmp_path, 10_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_thousand_hostile_requests_get_the_right_answer_each(tmp_path: Path) -> None:
    _run(tmp_path, 200_000)


@settings(max_examples=4, database=None)
@given(seeds)
def test_hostile_requests_over_http_leave_the_server_well(collector: CollectorProcess, seed: int) -> None:
    random = Random(seed)
    host, _, port = str(collector.address.http).rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    for _ in range(100):
        made = hostile(random)
        if not made.path.isprintable() or made.method not in ("POST", "GET", "PUT") or "\xff" in made.encoding:
            continue  # our own client refuses these
        headers = {"Content-Type": made.content_type, "Content-Encoding": made.encoding}
        connection.request(made.method, made.path, made.body, headers)
        response = connection.getresponse()
        body = response.read()
        expected = _expected(made) - ({413} if len(made.body) < MAX_BYTES else set())  # the limit is 64 MiB here
        # A body that decompresses to too many fields is refused before it is parsed.
        unfolded = {413} if made.encoding and b"send smaller" in body else set()
        assert response.status in expected | {200, 400} | unfolded, (response.status, made, body[:300])
        assert response.status < 500
    connection.close()
    _is_well(collector, seed)


@settings(max_examples=4, database=None)
@given(seeds)
def test_hostile_requests_over_grpc_leave_the_server_well(collector: CollectorProcess, seed: int) -> None:
    random = Random(seed)
    methods = {"/v1/traces": TRACES, "/v1/logs": LOGS, "/v1/metrics": METRICS}
    with channel(collector.address) as opened:
        for _ in range(100):
            made = hostile(random)
            method = methods.get(made.path)
            if method is None:
                continue
            code = grpc.StatusCode.OK
            try:
                opened.unary_unary(method)(made.body, timeout=20)
            except grpc.RpcError as error:
                code = error.code()
            try:
                SIGNAL_OF[made.path].request().ParseFromString(made.body)
            except DecodeError:
                refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                is_text = _is_text_alone_wrong(SIGNAL_OF[made.path], made.body)
                assert code in ((grpc.StatusCode.OK,) if is_text else refused), made
            else:
                assert code == grpc.StatusCode.OK, made
    _is_well(collector, seed)


def _is_well(collector: CollectorProcess, seed: int) -> None:
    """Checks that it still stores what it receives, and that nothing was quarantined."""
    trace = 2**100 + seed
    export(collector.address, span(trace, 1))
    assert any(row["trace_id"] == trace_id(trace).hex() for row in read(collector.address, "spans"))
    assert not list(collector.store.parent.glob("*.quarantine"))

"""Delivery of call spans if the collector is up, starts late, refuses them, or never starts."""

import errno
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.otlp.sink import otlp_sink
from tests.support.ports import free_port
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.policy_server import CallCounts
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_serving.export.call_span import CallSpan
from trainspan_serving.export.collector_client import CollectorClient
from trainspan_serving.export.exporter import Exporter
from trainspan_serving.export.spool import Spool

GIB = 2**30


def span(number: int = 0, payload: bytes = b"") -> CallSpan:
    attributes = {"number": number, "share": 0.5, "flag": True, "ids": payload, "reasons": ["stop"]}
    return CallSpan(secrets.token_hex(16), secrets.token_hex(8), None, "chat policy", 1, 2, attributes)


def exporter_to(url: str, folder: Path, *, spool_bytes: int = GIB, **options: int) -> Exporter:
    return Exporter(CollectorClient(url), Spool(folder / "spool", spool_bytes), **options)


def nowhere() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_spans_arrive_in_order_with_their_types(tmp_path: Path) -> None:
    with otlp_sink() as (sink, url):
        exporter = exporter_to(url, tmp_path)
        parent = secrets.token_hex(8)
        sent = CallSpan(
            secrets.token_hex(16), secrets.token_hex(8), parent, "chat policy", 5, 9, span(0, b"\1").attributes
        )
        exporter.add(sent)
        for number in range(1, 1200):
            exporter.add(span(number))
        exporter.close(5.0)
        received = sink.spans()
    assert [one.attributes["number"] for one in received] == list(range(1200))
    first = received[0]
    assert (first.trace_id, first.span_id, first.parent_span_id) == (sent.trace_id, sent.span_id, parent)
    assert (first.start_ns, first.end_ns, first.kind, first.status, first.links) == (5, 9, 2, 0, [])
    assert first.attributes == {"number": 0, "share": 0.5, "flag": True, "ids": b"\1", "reasons": ["stop"]}
    assert exporter.counts() == CallCounts(1200, 1200, 0)
    assert not list((tmp_path / "spool").rglob("*.otlp"))


def test_a_link_to_the_agents_own_trace_goes_along(tmp_path: Path) -> None:
    link = TraceParent("ab" * 16, "cd" * 8)
    with otlp_sink() as (sink, url):
        exporter = exporter_to(url, tmp_path)
        exporter.add(CallSpan("12" * 16, "34" * 8, None, "chat policy", 1, 2, {}, link=link))
        assert sink.wait(1)[0].links == [("ab" * 16, "cd" * 8)]
        exporter.close(5.0)


def test_calls_wait_on_disk_for_a_collector_that_starts_late_and_arrive_in_order(tmp_path: Path) -> None:
    port = free_port()
    exporter = exporter_to(f"http://127.0.0.1:{port}", tmp_path)
    for number in range(3):
        exporter.add(span(number))
        _wait_for(lambda count=number + 1: exporter.counts() == CallCounts(count, 0, 0, spooled=count))  # type: ignore[misc]
    with otlp_sink(port) as (sink, _):
        assert [one.attributes["number"] for one in sink.wait(3)] == [0, 1, 2]
        exporter.add(span(3))
        assert sink.wait(4)[3].attributes["number"] == 3
        exporter.close(5.0)
    assert exporter.counts() == CallCounts(4, 4, 0)


def test_what_a_dead_server_left_on_disk_is_sent_by_the_next_one_before_its_own(tmp_path: Path) -> None:
    first = exporter_to(nowhere(), tmp_path)
    for number in range(3):
        first.add(span(number))
    started = time.monotonic()
    first.close(5.0)
    assert time.monotonic() - started < 2.0  # it does not wait for an unreachable collector
    assert first.counts() == CallCounts(3, 0, 0, spooled=3)
    (left,) = (tmp_path / "spool").glob("*.otlp")
    assert (left.stat().st_mode & 0o777, (tmp_path / "spool").stat().st_mode & 0o777) == (0o600, 0o700)
    (tmp_path / "spool" / "0000000000000009-5.tmp").write_bytes(b"half a request")

    port = free_port()
    second = exporter_to(f"http://127.0.0.1:{port}", tmp_path)
    assert second.counts() == CallCounts(0, 0, 0, recovered=3)
    second.add(span(3))
    with otlp_sink(port) as (sink, _):
        assert [one.attributes["number"] for one in sink.wait(4)] == [0, 1, 2, 3]
        second.close(5.0)
    assert second.counts() == CallCounts(1, 1, 0)
    assert not list((tmp_path / "spool").rglob("*.otlp"))


def test_beyond_the_bounds_of_disk_and_queue_the_newest_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    exporter = exporter_to(f"http://127.0.0.1:{port}", tmp_path, spool_bytes=20_000, max_calls=1)
    for number in range(2):  # two of 8 KB fit on disk, a third in memory
        exporter.add(span(number, bytes(8_000)))
        _wait_for(lambda count=number + 1: exporter.counts().spooled == count)  # type: ignore[misc]
    for number in range(2, 5):
        exporter.add(span(number, bytes(8_000)))
    assert exporter.counts() == CallCounts(5, 0, 2, spooled=2)
    assert sum(file.stat().st_size for file in (tmp_path / "spool").rglob("*.otlp")) <= 20_000
    assert "calls dropped count=1" in caplog.text
    with otlp_sink(port) as (sink, _):
        assert [one.attributes["number"] for one in sink.wait(3)] == [0, 1, 2]
        _wait_for(lambda: exporter.counts().exported == 3)
        exporter.add(span(5))
        assert sink.wait(4)[3].attributes["number"] == 5
        exporter.close(5.0)
    assert exporter.counts() == CallCounts(6, 4, 2)


def test_calls_that_cannot_be_written_to_disk_wait_in_memory_and_are_counted_as_lost_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    exporter = exporter_to(f"http://127.0.0.1:{port}", tmp_path)
    shutil.rmtree(tmp_path / "spool")
    exporter.add(span())
    time.sleep(0.5)
    assert exporter.counts() == CallCounts(1, 0, 0)
    with otlp_sink(port) as (sink, _):
        sink.wait(1)
        _wait_for(lambda: exporter.counts().exported == 1)
    exporter.add(span())
    exporter.close(0.5)
    assert exporter.counts() == CallCounts(2, 1, 1)
    assert "calls dropped count=1" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_after_five_minutes_of_outage_under_traffic_everything_is_delivered(tmp_path: Path) -> None:
    port = free_port()
    exporter = exporter_to(f"http://127.0.0.1:{port}", tmp_path)
    count = 0
    ends = time.monotonic() + 300
    while time.monotonic() < ends:
        for _ in range(20):
            exporter.add(span(count, bytes(2_000)))
            count += 1
        time.sleep(0.1)
    assert exporter.counts().dropped == exporter.counts().exported == 0
    with otlp_sink(port) as (sink, _):
        received = sink.wait(count, timeout_s=60)
        exporter.close(10.0)
    assert [one.attributes["number"] for one in received] == list(range(count))
    assert exporter.counts() == CallCounts(count, count, 0)


def test_the_queue_is_bounded_by_number_and_by_bytes(tmp_path: Path) -> None:
    few = exporter_to(nowhere(), tmp_path / "few", max_calls=3, delay_s=60)
    started = time.monotonic()
    for number in range(5):
        few.add(span(number))
    assert time.monotonic() - started < 0.1
    assert few.counts() == CallCounts(5, 0, 2)
    small = exporter_to(nowhere(), tmp_path / "small", max_bytes=10_000, delay_s=60)
    small.add(span(0, bytes(8_000)))
    small.add(span(1, bytes(8_000)))
    assert small.counts() == CallCounts(2, 0, 1)
    few.close(0.2)
    small.close(0.2)


def test_calls_that_the_collector_refuses_permanently_are_kept_and_retried_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with otlp_sink() as (sink, url):
        sink.refusals = [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE]
        exporter = exporter_to(url, tmp_path)
        exporter.add(span(0))
        _wait_for(lambda: exporter.counts().refused == 1)
        exporter.add(span(1))
        assert sink.wait(1)[0].attributes["number"] == 1
        exporter.close(5.0)
        assert exporter.counts() == CallCounts(2, 1, 0, refused=1)
        assert "calls refused count=1" in caplog.text
        assert len(list((tmp_path / "spool" / "refused").glob("*.otlp"))) == 1
        again = exporter_to(url, tmp_path)
        assert sink.wait(2)[1].attributes["number"] == 0
        again.close(5.0)
    assert not list((tmp_path / "spool").rglob("*.otlp"))


def test_a_refused_request_out_of_the_spool_is_kept_too(tmp_path: Path) -> None:
    port = free_port()
    exporter = exporter_to(f"http://127.0.0.1:{port}", tmp_path)
    exporter.add(span(0))
    _wait_for(lambda: exporter.counts().spooled == 1)
    with otlp_sink(port) as (sink, _):
        sink.refusals = [grpc.StatusCode.INVALID_ARGUMENT]
        _wait_for(lambda: exporter.counts() == CallCounts(1, 0, 0, refused=1))
        exporter.close(5.0)
    assert len(list((tmp_path / "spool" / "refused").glob("*.otlp"))) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
def test_calls_wait_while_their_token_is_refused_and_are_sent_with_the_changed_one(
    tmp_path: Path, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[tuple[str, str], ...]] = []

    def metadata() -> tuple[tuple[str, str], ...]:
        asked.append((("authorization", f"Bearer {len(asked)}"),))
        return asked[-1]

    with otlp_sink() as (sink, url):
        sink.refusals = [code] * 3
        exporter = Exporter(CollectorClient(url, metadata), Spool(tmp_path / "spool", GIB))
        for number in range(50):
            exporter.add(span(number))
        _wait_for(lambda: exporter.trouble() is not None or len(asked) > 3)
        assert [one.attributes["number"] for one in sink.wait(50)] == list(range(50))
        _wait_for(lambda: exporter.counts() == CallCounts(50, 50, 0))
        assert exporter.trouble() is None
        exporter.close(5.0)
    assert len(asked) == 4
    assert code.name in caplog.text


@pytest.mark.parametrize("damage", [b"", b"cut off"])
def test_a_damaged_file_is_never_sent_nor_counted_as_sent(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = exporter_to(nowhere(), tmp_path)
    first.add(span(0))
    first.close(5.0)
    (left,) = (tmp_path / "spool").glob("*.otlp")
    left.write_bytes(damage)
    with otlp_sink() as (sink, url):
        second = exporter_to(url, tmp_path)
        second.add(span(1))
        assert [one.attributes["number"] for one in sink.wait(1)] == [1]
        second.close(5.0)
        assert len(sink.spans()) == 1
    assert "calls of an earlier server dropped count=1 reason=their file in the spool is gone or damaged" in caplog.text


def test_files_that_cannot_be_read_now_are_kept_and_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = exporter_to(nowhere(), tmp_path)
    for number in range(3):
        first.add(span(number))
        _wait_for(lambda count=number + 1: first.counts().spooled == count)  # type: ignore[misc]
    first.close(5.0)
    n_files = len(list((tmp_path / "spool").glob("*.otlp")))

    def fail(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with otlp_sink() as (sink, url), monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        second = exporter_to(url, tmp_path)
        _wait_for(lambda: second.trouble() is not None)
        time.sleep(0.3)
        assert second.trouble() == "cannot read the spool: [Errno 24] Too many open files"
        assert (len(list((tmp_path / "spool").glob("*.otlp"))), second.counts().recovered) == (n_files, 3)
        patch.undo()
        assert [one.attributes["number"] for one in sink.wait(3)] == [0, 1, 2]
        second.close(5.0)
        assert second.trouble() is None
    assert "calls cannot be sent reason=cannot read the spool" in caplog.text


def test_a_token_that_cannot_be_read_now_is_read_again(tmp_path: Path) -> None:
    n_asked = 0

    def metadata() -> tuple[tuple[str, str], ...]:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return (("authorization", f"Bearer {n_asked}"),)

    with otlp_sink() as (sink, url):
        sink.refusals = [grpc.StatusCode.UNAUTHENTICATED] * 2
        exporter = Exporter(CollectorClient(url, metadata), Spool(tmp_path / "spool", GIB))
        exporter.add(span(0))
        assert sink.wait(1)[0].attributes["number"] == 0
        exporter.close(5.0)
    assert (n_asked, exporter.counts()) == (3, CallCounts(1, 1, 0))


@pytest.mark.parametrize(
    ("trailers", "refused"),
    [
        ((), 1),
        ((("google.rpc.retryinfo-bin", b""),), 0),
        ((("grpc-status-details-bin", b"\x1a\x2atype.googleapis.com/google.rpc.RetryInfo"),), 0),
        ((("grpc-status-details-bin", b"\x1a\x2ctype.googleapis.com/google.rpc.QuotaFailure"),), 1),
    ],
)
def test_a_request_that_is_too_large_is_refused_unless_the_response_asks_for_a_retry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trailers: tuple[tuple[str, bytes], ...], refused: int
) -> None:
    with otlp_sink() as (sink, url):
        sink.refusals, sink.trailers = [grpc.StatusCode.RESOURCE_EXHAUSTED], trailers
        exporter = exporter_to(url, tmp_path)
        exporter.add(span(0))
        _wait_for(lambda: exporter.counts() == CallCounts(1, 1 - refused, 0, refused=refused))
        exporter.close(5.0)
    assert ("RESOURCE_EXHAUSTED" in caplog.text) or not refused


def test_only_the_span_that_cannot_be_encoded_is_lost(tmp_path: Path) -> None:
    with otlp_sink() as (sink, url):
        exporter = exporter_to(url, tmp_path)
        for number in (0, 2**64, 2):
            exporter.add(span(number))
        exporter.close(5.0)
        assert [one.attributes["number"] for one in sink.spans()] == [0, 2]
    assert exporter.counts() == CallCounts(3, 2, 1)


def test_without_a_collector_calls_are_counted_and_dropped() -> None:
    exporter = Exporter(None, None)
    exporter.add(span())
    exporter.close(1.0)
    assert exporter.counts() == CallCounts(1, 0, 1)


def test_an_endpoint_that_is_not_a_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="collector 'ftp://x' is not a URL"):
        CollectorClient("ftp://x")


def _wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

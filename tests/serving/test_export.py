"""What becomes of call spans when the collector is there, comes late, refuses, or never comes."""

import secrets
import time
from collections.abc import Callable

import grpc
import pytest

from tests.support.otlp_sink import free_port, otlp_sink
from trainspan_schemas.errors import ConfigError
from trainspan_serving.export import Counts, Exporter
from trainspan_serving.otlp import CallSpan


def span(number: int = 0, payload: bytes = b"") -> CallSpan:
    attributes = {"number": number, "share": 0.5, "flag": True, "ids": payload, "reasons": ["stop"]}
    return CallSpan(secrets.token_hex(16), secrets.token_hex(8), None, "chat policy", 1, 2, attributes)


def test_spans_arrive_in_order_with_their_types() -> None:
    with otlp_sink() as (sink, url):
        exporter = Exporter(url)
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
    assert (first.start_ns, first.end_ns, first.kind, first.status) == (5, 9, 2, 0)
    assert first.attributes == {"number": 0, "share": 0.5, "flag": True, "ids": b"\1", "reasons": ["stop"]}
    assert exporter.counts() == Counts(1200, 1200, 0)


def test_calls_wait_for_a_collector_that_comes_late() -> None:
    port = free_port()
    exporter = Exporter(f"http://127.0.0.1:{port}")
    exporter.add(span())
    time.sleep(0.5)
    assert exporter.counts() == Counts(1, 0, 0)
    with otlp_sink(port) as (sink, _):
        sink.wait(1)
        exporter.close(5.0)
    assert exporter.counts() == Counts(1, 1, 0)


def test_without_a_collector_the_newest_are_dropped_and_counted() -> None:
    port = free_port()
    exporter = Exporter(f"http://127.0.0.1:{port}", max_calls=3)
    started = time.monotonic()
    for number in range(5):
        exporter.add(span(number))
    assert time.monotonic() - started < 0.1
    assert exporter.counts() == Counts(5, 0, 2)
    with otlp_sink(port) as (sink, _):
        assert [one.attributes["number"] for one in sink.wait(3)] == [0, 1, 2]
        exporter.close(5.0)


def test_the_queue_is_bounded_by_bytes_too() -> None:
    exporter = Exporter(f"http://127.0.0.1:{free_port()}", max_bytes=10_000)
    exporter.add(span(0, bytes(8_000)))
    exporter.add(span(1, bytes(8_000)))
    assert exporter.counts() == Counts(2, 0, 1)
    exporter.close(0.2)


def test_closing_without_a_collector_is_bounded_and_counts_what_was_lost() -> None:
    exporter = Exporter(f"http://127.0.0.1:{free_port()}")
    for number in range(4):
        exporter.add(span(number))
    started = time.monotonic()
    exporter.close(0.5)
    assert time.monotonic() - started < 2.0
    assert exporter.counts() == Counts(4, 0, 4)


def test_what_the_collector_refuses_for_good_is_dropped_and_what_it_cannot_take_now_is_sent_again() -> None:
    with otlp_sink() as (sink, url):
        sink.refusals = [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED]
        exporter = Exporter(url)
        exporter.add(span(0))
        _wait_for(lambda: exporter.counts().dropped == 1)
        exporter.add(span(1))
        assert sink.wait(1)[0].attributes["number"] == 1
        exporter.close(5.0)
    assert exporter.counts() == Counts(2, 1, 1)


def test_a_span_that_cannot_be_encoded_takes_no_other_with_it() -> None:
    with otlp_sink() as (sink, url):
        exporter = Exporter(url)
        for number in (0, 2**64, 2):
            exporter.add(span(number))
        exporter.close(5.0)
        assert [one.attributes["number"] for one in sink.spans()] == [0, 2]
    assert exporter.counts() == Counts(3, 2, 1)


def test_no_collector_wanted_means_counted_and_dropped() -> None:
    exporter = Exporter(None)
    exporter.add(span())
    exporter.close(1.0)
    assert exporter.counts() == Counts(1, 0, 1)


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"serving\.collector = 'ftp://x' is no URL"):
        Exporter("ftp://x")


def _wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

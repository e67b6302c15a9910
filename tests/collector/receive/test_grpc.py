"""OTLP/gRPC over real connections: what is accepted, what is refused, and with which status."""

import json
import math
import re
import socket
import time
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags

from tests.support.collector.process import (
    LOGS,
    METRICS,
    TRACES,
    CollectorProcess,
    channel,
    export,
    read,
    runner_metadata,
    running,
    select,
    send,
    span,
    trace_id,
    trace_request,
)
from tests.support.otlp.http import request

MIB = 1024 * 1024


def _stored(collector: CollectorProcess, trace: int) -> list[tuple[str, str]]:
    return select(
        collector.address,
        f"SELECT span_id, name FROM spans WHERE trace_id = '{trace_id(trace).hex()}' ORDER BY seq",
    )


def _refusal(collector: CollectorProcess, method: str, body: bytes, **options: object) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        send(collector.address, method, body, **options)
    return caught.value


def test_a_text_that_is_not_utf_8_costs_neither_its_batch_nor_its_span(collector: CollectorProcess) -> None:
    """As SDKs in languages send it whose strings may hold any bytes; ids that differ there stay different."""
    body = trace_request(
        span(941, 1, name="fine"),
        span(941, 2, {"trainspan.rollout.id": "AAAA", "long": "é" * 100}, name="BBBB"),
        span(941, 3, {"trainspan.rollout.id": "CCCC"}),
    ).SerializeToString()
    for valid, sent in ((b"AAAA", b"a\xed\xa0\xbd"), (b"BBBB", b"\xffend"), (b"CCCC", b"a\xed\xa0\xbe")):
        body = body.replace(valid, sent)
    before = _repaired_texts(collector)
    send(collector.address, TRACES, body)
    assert [name for _, name in _stored(collector, 941)][:2] == ["fine", "\\xffend"]
    where = f"trace_id = '{trace_id(941).hex()}' ORDER BY span_id"
    texts = [json.loads(text) for (text,) in select(collector.address, f"SELECT attributes FROM spans WHERE {where}")]
    assert [text.get("trainspan.rollout.id") for text in texts] == [None, "a\\xed\\xa0\\xbd", "a\\xed\\xa0\\xbe"]
    assert texts[1]["long"] == "é" * 100
    assert _repaired_texts(collector) == before + 3
    for cut_short in (body[:-1], body.replace(b"\xffend", b"\xffen") + b"\x0a"):
        assert _refusal(collector, TRACES, cut_short).code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", [TRACES, LOGS, METRICS])
def test_a_text_that_is_not_utf_8_is_taken_with_every_signal(collector: CollectorProcess, method: str) -> None:
    """In all three, field 1.1.1 is an attribute of the resource."""
    key = b"\x0a\x03a\xffb"
    body = b"\x0a\x09\x0a\x07\x0a\x05" + key
    send(collector.address, method, body)
    assert _refusal(collector, method, body[:-1]).code() == grpc.StatusCode.INVALID_ARGUMENT


def _repaired_texts(collector: CollectorProcess) -> int:
    page = request(collector.address, "/metrics", method="GET").body.decode()
    (line,) = (line for line in page.splitlines() if line.startswith("trainspan_collector_repaired_texts_"))
    return int(float(line.split()[-1]))


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_the_sdk_exporter_delivers_every_field_of_a_span(
    collector: CollectorProcess, compression: grpc.Compression
) -> None:
    exporter = OTLPSpanExporter(
        endpoint=f"http://{collector.address.grpc}",
        insecure=True,
        compression=compression,
        headers=runner_metadata(str(collector.address.grpc)),
    )
    provider = TracerProvider(resource=Resource({"service.name": "agent", "replicas": 2}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("my.scope", "1.2", attributes={"scoped": True})
    linked = SpanContext(0xABC, 0xDEF, True, TraceFlags(1))
    with tracer.start_as_current_span("parent") as parent:
        child = tracer.start_span(
            "child", kind=SpanKind.CLIENT, attributes={"n": 1, "x": 2.0, "many": ["a", "b"]}, links=[Link(linked, {"l": 1})]
        )  # fmt: skip
        child.add_event("happened", {"b": b"\x01"}, timestamp=77)
        child.set_status(StatusCode.ERROR, "it broke")
        child.end()
    provider.shutdown()

    context = parent.get_span_context()
    stored = {row["name"]: row for row in _rows_of_trace(collector, f"{context.trace_id:032x}")}
    row = stored["child"]
    assert row["parent_span_id"] == f"{context.span_id:016x}" == stored["parent"]["span_id"]
    assert stored["parent"]["parent_span_id"] is None
    assert (row["kind"], row["status_code"], row["status_message"]) == (3, 2, "it broke")
    assert (row["service_name"], row["scope_name"]) == ("agent", "my.scope")
    assert row["start_ns"] == child.start_time  # type: ignore[attr-defined]
    assert row["end_ns"] == child.end_time  # type: ignore[attr-defined]
    assert json.loads(row["attributes"]) == {"n": 1, "x": 2.0, "many": ["a", "b"]}
    assert json.loads(row["resource"]) == {"service.name": "agent", "replicas": 2}
    assert json.loads(row["events"]) == [
        {"name": "happened", "time_ns": 77, "dropped_attributes": 0, "attributes": {"b": {"bytes": "AQ=="}}}
    ]
    [link] = json.loads(row["links"])
    assert link["trace_id"] == f"{0xABC:032x}"
    assert (link["span_id"], link["attributes"]) == (f"{0xDEF:016x}", {"l": 1})


def _rows_of_trace(collector: CollectorProcess, trace: str) -> list[dict[str, object]]:
    return [row for row in read(collector.address, "spans") if row["trace_id"] == trace]


def test_hostile_keys_values_and_numbers_are_stored_as_they_came(collector: CollectorProcess) -> None:
    attributes = {
        "'; DROP TABLE spans; --": "x' OR 1=1",
        "k" * 3_000: "long key",
        "nul\x00\x1b[31m😀": "\x00\u202e",
        "nan": math.nan,
        "deep": [{"a": [b"\x00", {"b": None}]}],
        "": "",
    }
    sent = span(
        101, 1, attributes, name="n\x00😀'\"", flags=0x301, trace_state="a=b", dropped_attributes_count=3,
        dropped_events_count=4, dropped_links_count=2**32 - 1, kind=99, start_time_unix_nano=2**63 - 1, end_time_unix_nano=2**64 - 1,
    )  # fmt: skip
    sent.links.add(trace_id=trace_id(9), span_id=b"\x01", trace_state="k=v", flags=1, dropped_attributes_count=2)
    assert export(collector.address, sent, resource={"r'": "\x00"}) == b""
    [row] = _rows_of_trace(collector, trace_id(101).hex())
    assert json.loads(str(row["attributes"])) == {
        "'; DROP TABLE spans; --": "x' OR 1=1",
        "k" * 3_000: "long key",
        "nul\x00\x1b[31m😀": "\x00\u202e",
        "nan": {"double": "NaN"},
        "deep": [{"kvlist": [["a", [{"bytes": "AA=="}, {"kvlist": [["b", None]]}]]]}],
        "": "",
    }
    assert json.loads(str(row["resource"])) == {"r'": "\x00"}
    assert json.loads(str(row["links"])) == [
        {
            "trace_id": trace_id(9).hex(), "span_id": "01", "trace_state": "k=v", "flags": 1, "dropped_attributes": 2,
            "attributes": {},
        }
    ]  # fmt: skip
    assert (row["name"], row["flags"], row["trace_state"], row["kind"]) == ("n\x00😀'\"", 0x301, "a=b", 99)
    assert (row["dropped_attributes"], row["dropped_events"], row["dropped_links"]) == (3, 4, 2**32 - 1)
    assert (row["start_ns"], row["end_ns"]) == (2**63 - 1, 2**63 - 1)  # BIGINT: clamped to its maximum


@pytest.mark.parametrize("method", [TRACES, LOGS, METRICS])
def test_an_empty_request_is_a_full_success(collector: CollectorProcess, method: str) -> None:
    assert send(collector.address, method, b"") == b""


@pytest.mark.parametrize("method", [TRACES, LOGS, METRICS])
def test_a_body_that_is_no_such_message_is_an_invalid_argument(collector: CollectorProcess, method: str) -> None:
    error = _refusal(collector, method, b"\xff\xff\xff\xffnot protobuf")
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not protobuf" not in error.details()
    assert not error.trailing_metadata()  # nothing that suggests a retry


def test_spans_without_valid_ids_are_counted_and_named_and_the_others_are_stored(collector: CollectorProcess) -> None:
    good = span(102, 1)
    bad = [
        span(102, 2, name="short trace"),
        span(102, 3, name="long span"),
        span(0, 4, name="zero trace"),
        span(102, 0, name="zero span"),
    ]
    bad[0].trace_id = b"\x01\x02"
    bad[1].span_id = bytes(9)
    answer = ExportTraceServiceResponse.FromString(export(collector.address, *bad, good))
    assert answer.partial_success.rejected_spans == 4
    message = answer.partial_success.error_message
    assert "'short trace' (0102/0000000000000002): trace id has 2 bytes, not 16" in message
    assert "'long span'" in message
    assert "span id has 9 bytes, not 8" in message
    assert "'zero trace'" in message
    assert "trace id is all zeros" in message
    assert "'zero span'" in message
    assert "span id is all zeros" in message
    assert _stored(collector, 102) == [(good.span_id.hex(), "s")]


def test_a_thousand_bad_spans_do_not_make_a_thousand_line_message(collector: CollectorProcess) -> None:
    spans = [span(0, number, name="x" * 500) for number in range(1, 1001)]
    answer = ExportTraceServiceResponse.FromString(export(collector.address, *spans))
    assert answer.partial_success.rejected_spans == 1000
    assert answer.partial_success.error_message.endswith("and 995 more")
    assert len(answer.partial_success.error_message) < 2_000


def _body_of(n_bytes: int, trace: int) -> bytes:
    """Eight spans of about the same size."""
    spans = [span(trace, number, {"text": "a" * (n_bytes // 8)}) for number in range(1, 8)]

    def of(last_bytes: int) -> bytes:
        return trace_request(*spans, span(trace, 8, {"text": "a" * last_bytes})).SerializeToString()

    about = n_bytes // 8 - 1000
    return of(about + n_bytes - len(of(about)))


def test_a_request_of_64_mib_is_stored_and_one_byte_more_is_refused_for_good(collector: CollectorProcess) -> None:
    largest = _body_of(64 * MIB, 103)
    assert len(largest) == 64 * MIB
    assert send(collector.address, TRACES, largest) == b""
    assert len(_stored(collector, 103)) == 8
    before = _refused_as_too_large(collector)
    error = _refusal(collector, TRACES, largest + b"\x00")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not [key for key, _ in error.trailing_metadata() if "retry" in key]
    _assert_counted_as_too_large(collector, before + 1)


def test_a_decompression_bomb_is_cut_before_it_fills_memory(collector: CollectorProcess) -> None:
    before, n_before = _peak_mib(collector), _refused_as_too_large(collector)
    error = _refusal(collector, TRACES, bytes(300 * MIB), compression=grpc.Compression.Gzip)  # 0.3 MiB on the wire
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not [key for key, _ in error.trailing_metadata() if "retry" in key]
    assert _peak_mib(collector) - before < 200
    _assert_counted_as_too_large(collector, n_before + 1)


def _refused_as_too_large(collector: CollectorProcess) -> float:
    page = request(collector.address, "/metrics", method="GET", content_type=None).body.decode()
    found = re.search(r'refused_requests_total{reason="too_large",transport="grpc"} (\S+)', page)
    return float(found[1]) if found else 0.0


def _assert_counted_as_too_large(collector: CollectorProcess, expected: float) -> None:
    deadline = time.monotonic() + 10  # gRPC itself answers; the counter is updated later
    while _refused_as_too_large(collector) != expected:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _peak_mib(collector: CollectorProcess) -> float:
    status = Path(f"/proc/{collector.process.pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_the_health_service_answers_for_the_process_and_its_services(collector: CollectorProcess) -> None:
    with channel(collector.address) as opened:
        check = opened.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=5) == b"\x08\x01"
        name = b"opentelemetry.proto.collector.trace.v1.TraceService"
        assert check(b"\x0a" + bytes([len(name)]) + name, timeout=5) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as caught:
            check(b"\x0a\x01x", timeout=5)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.slow
def test_keepalive_pings_of_an_idle_client_every_ten_seconds_are_welcome(collector: CollectorProcess) -> None:
    assert _frames_after_pings(collector, pause_s=10.2, n_pings=5) == [PING] * 5


def test_a_client_that_pings_all_the_time_is_sent_away(collector: CollectorProcess) -> None:
    assert _frames_after_pings(collector, pause_s=0.05, n_pings=5)[-1] == GO_AWAY


PING, GO_AWAY, SETTINGS = 6, 7, 4


def _frames_after_pings(collector: CollectorProcess, *, pause_s: float, n_pings: int) -> list[int]:
    """Types of the HTTP/2 frames, except settings, that answer pings on a connection without calls."""
    host, _, port = str(collector.address.grpc).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]))
        received = connection.makefile("rb")
        kinds: list[int] = []
        for number in range(n_pings):
            time.sleep(pause_s)
            connection.sendall(bytes([0, 0, 8, PING, 0, 0, 0, 0, 0]) + number.to_bytes(8, "big"))
            while len(kinds) <= number:
                head = received.read(9)
                received.read(int.from_bytes(head[:3], "big"))
                if head[3] == GO_AWAY:
                    return [*kinds, GO_AWAY]
                if head[3] == PING and head[4] & 1:
                    kinds.append(PING)
    return kinds


def test_want_of_disk_is_unavailable_with_the_time_to_come_back_in_both_trailers(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", min_free_disk_bytes=2**62, overload_wait_s=0.3) as full:
        began = time.monotonic()
        error = _refusal(full, TRACES, trace_request(span(1, 1)).SerializeToString())
        assert 0.3 <= time.monotonic() - began < 5  # it waited first, but not for long
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "disk" in error.details()
        trailers = dict(error.trailing_metadata())
        assert RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"]).retry_delay.seconds > 0
        status = Status.FromString(trailers["grpc-status-details-bin"])
        detail = RetryInfo()
        assert status.details[0].Unpack(detail)
        assert (status.code, detail.retry_delay.seconds) == (14, 10)
        assert send(full.address, TRACES, b"") == b""  # nothing to store, nothing to refuse
        assert select(full.address, "SELECT count(*) FROM spans") == [(0,)]

"""OTLP over HTTP, byte by byte: bodies, encodings, limits, partial success, errors with their status and body."""

import contextlib
import gzip
import json
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from tests.support.collector.process import (
    ANY_PORT,
    CollectorProcess,
    any_value,
    read,
    running,
    select,
    span,
    span_id,
    trace_id,
    trace_request,
)
from tests.support.otlp.http import JSON, PROTOBUF, gzipped, raw, request

MIB = 1024 * 1024


def _span_ids(collector: CollectorProcess, trace: int) -> list[str]:
    rows = select(
        collector.address, f"SELECT span_id FROM spans WHERE trace_id = '{trace_id(trace).hex()}' ORDER BY ALL"
    )
    return [row[0] for row in rows]


def _body(trace: int, *numbers: int) -> bytes:
    return trace_request(*(span(trace, number) for number in numbers)).SerializeToString()


def _pieces(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_body_is_taken_in_each_form_that_an_exporter_sends(
    collector: CollectorProcess, compressed: bool, chunked: bool, as_json: bool
) -> None:
    trace = 1000 + compressed + 2 * chunked + 4 * as_json
    body = _body(trace, 1, 2)
    if as_json:
        spans = [{"traceId": trace_id(trace).hex(), "spanId": span_id(number).hex(), "name": "s"} for number in (1, 2)]
        body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    headers = {"Content-Encoding": "gzip"} if compressed else {}
    body = gzipped(body) if compressed else body
    content_type = f"{JSON}; charset=utf-8" if as_json else PROTOBUF
    answer = request(
        collector.address,
        "/v1/traces",
        _pieces(body, 7) if chunked else body,
        content_type=content_type,
        headers=headers,
    )
    assert (answer.status, answer.headers["content-type"]) == (200, content_type)
    assert answer.body == (b"{}" if as_json else b"")
    assert _span_ids(collector, trace) == [span_id(1).hex(), span_id(2).hex()]


def test_logs_are_stored_and_metrics_are_counted(collector: CollectorProcess) -> None:
    logs = ExportLogsServiceRequest()
    record = LogRecord(trace_id=trace_id(1010), span_id=span_id(1), body=any_value("over HTTP"), time_unix_nano=5)
    logs.resource_logs.add().scope_logs.add().log_records.append(record)
    assert request(collector.address, "/v1/logs", logs.SerializeToString()).status == 200
    metrics = (
        b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"m","sum":{"dataPoints":[{"asInt":"1"}]}}]}]}]}'
    )
    assert request(collector.address, "/v1/metrics", metrics, content_type=JSON).status == 200
    assert [row["body"] for row in read(collector.address, "logs") if row["trace_id"] == trace_id(1010).hex()] == [
        '"over HTTP"'
    ]
    page = request(collector.address, "/metrics", method="GET", content_type=None).body.decode()
    assert 'trainspan_collector_accepted_requests_total{signal="metrics",transport="http"} 1.0' in page


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/logs", "/v1/metrics"])
@pytest.mark.parametrize(("body", "content_type"), [(b"", PROTOBUF), (b"{}", JSON)])
def test_an_empty_request_is_a_full_success(
    collector: CollectorProcess, path: str, body: bytes, content_type: str
) -> None:
    answer = request(collector.address, path, body, content_type=content_type)
    assert (answer.status, answer.body) == (200, body)


def test_json_keeps_every_field_and_type(collector: CollectorProcess) -> None:
    text = """{"resourceSpans": [{"schemaUrl": "https://r", "resource": {"attributes": [
      {"key": "service.name", "value": {"stringValue": "web"}}], "droppedAttributesCount": 1}, "scopeSpans": [{
      "schemaUrl": "https://s", "scope": {"name": "sc", "version": "1"}, "spans": [{
        "traceId": "000000000000000000000000000003FC", "spanId": "00000000000000aB", "parentSpanId": "00000000000000CD",
        "traceState": "a=b", "flags": 257, "name": "n", "kind": 3, "startTimeUnixNano": "18446744073709551615",
        "endTimeUnixNano": 1700000000000000001, "droppedAttributesCount": 2, "status": {"code": 2, "message": "no"},
        "notInTheSpec": {"x": [1]}, "attributes": [
          {"key": "s", "value": {"stringValue": "\\u0000\\ud83d\\ude00"}}, {"key": "i", "value": {"intValue": "-9223372036854775808"}},
          {"key": "j", "value": {"intValue": 7}}, {"key": "d", "value": {"doubleValue": 2}}, {"key": "b", "value": {"boolValue": false}},
          {"key": "n", "value": {"doubleValue": "NaN"}}, {"key": "y", "value": {"bytesValue": "AQID"}}, {"key": "e", "value": {}},
          {"key": "a", "value": {"arrayValue": {"values": [{"stringValue": "q"}, {}]}}},
          {"key": "k", "value": {"kvlistValue": {"values": [{"key": "z", "value": {"intValue": "1"}}]}}}, {"key": "none"}],
        "events": [{"name": "ev", "timeUnixNano": "9", "attributes": [{"key": "o", "value": {"boolValue": true}}]}],
        "links": [{"traceId": "000000000000000000000000000000ff", "spanId": "00000000000000ee", "traceState": "c=d", "flags": 1}]
      }]}]}]}"""
    assert request(collector.address, "/v1/traces", text.encode(), content_type=JSON).body == b"{}"
    [row] = [row for row in read(collector.address, "spans") if row["trace_id"] == trace_id(1020).hex()]
    assert (row["span_id"], row["parent_span_id"]) == ("00000000000000ab", "00000000000000cd")
    assert (row["kind"], row["status_code"], row["status_message"]) == (3, 2, "no")
    assert (row["flags"], row["trace_state"], row["dropped_attributes"]) == (257, "a=b", 2)
    assert (row["start_ns"], row["end_ns"]) == (2**63 - 1, 1700000000000000001)
    assert json.loads(row["attributes"]) == {
        "s": "\x00😀", "i": -(2**63), "j": 7, "d": 2.0, "b": False, "n": {"double": "NaN"}, "y": {"bytes": "AQID"}, "e": None,
        "a": ["q", None], "k": {"kvlist": [["z", 1]]}, "none": None,
    }  # fmt: skip
    assert isinstance(json.loads(row["attributes"])["d"], float)
    [event] = json.loads(row["events"])
    assert (event["name"], event["time_ns"], event["attributes"]) == ("ev", 9, {"o": True})
    [link] = json.loads(row["links"])
    assert (link["trace_id"], link["span_id"], link["trace_state"]) == (trace_id(255).hex(), span_id(0xEE).hex(), "c=d")


def test_half_a_surrogate_pair_does_not_cost_the_batch(collector: CollectorProcess) -> None:
    spans = [{"traceId": trace_id(1021).hex(), "spanId": span_id(1).hex(), "name": "cut \ud83d here"}]
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    assert request(collector.address, "/v1/traces", body, content_type=JSON).status == 200
    [row] = [row for row in read(collector.address, "spans") if row["trace_id"] == trace_id(1021).hex()]
    assert row["name"] == "cut \\ud83d here"


@pytest.mark.parametrize("content_type", [PROTOBUF, JSON])
def test_partial_success_counts_and_names_what_was_rejected(collector: CollectorProcess, content_type: str) -> None:
    trace = 1030 + (content_type == JSON)
    if content_type == PROTOBUF:
        body = trace_request(span(trace, 1), span(trace, 0, name="zero")).SerializeToString()
    else:
        good = {"traceId": trace_id(trace).hex(), "spanId": span_id(1).hex()}
        bad = {"traceId": trace_id(trace).hex(), "spanId": "0000000000000000", "name": "zero"}
        body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [good, bad]}]}]}).encode()
    answer = request(collector.address, "/v1/traces", body, content_type=content_type)
    assert answer.status == 200
    if content_type == PROTOBUF:
        partial = ExportTraceServiceResponse.FromString(answer.body).partial_success
        n_rejected, message = partial.rejected_spans, partial.error_message
    else:
        stated: dict[str, Any] = json.loads(answer.body)["partialSuccess"]
        n_rejected, message = int(stated["rejectedSpans"]), stated["errorMessage"]
        assert stated["rejectedSpans"] == "1"  # 64-bit integers are strings
    assert n_rejected == 1
    assert "'zero'" in message
    assert "span id is all zeros" in message
    assert _span_ids(collector, trace) == [span_id(1).hex()]


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        (PROTOBUF, b"\xff\xff\xff\xffnot protobuf", "is not an ExportTraceServiceRequest in protobuf"),
        (JSON, b"{", "is not an ExportTraceServiceRequest in JSON"),
        (JSON, b"\xff", "in JSON"),
        (JSON, b"[]", "a JSON list, not an object"),
        (JSON, b'{"resourceSpans": 5}', "in JSON"),
        (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}', "traceId 'xyz' is not hex"),
        (JSON, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "soon"}]}]}]}', "in JSON"),
        (JSON, b'{"a":' * 100_000, "in JSON"),
    ],
)
def test_what_cannot_be_decoded_is_a_bad_request_with_a_status_in_the_same_form(
    collector: CollectorProcess, content_type: str, body: bytes, said: str
) -> None:
    answer = request(collector.address, "/v1/traces", body, content_type=content_type)
    assert (answer.status, answer.headers["content-type"]) == (400, content_type)
    assert "retry-after" not in answer.headers
    assert answer.error.code == 3
    assert said in answer.error.message
    assert len(answer.error.message) < 1_000


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"plainly not gzip", "is not gzip"),
        (gzip.compress(b"x" * 100)[:-9], "is cut off"),
        (gzip.compress(b"x" * 100)[:-8] + bytes(8), "is not gzip"),
        (gzip.compress(b"") * 17, "more than 16 members"),
        (b"\x1f\x8b\x08\x20" + gzip.compress(b"x")[4:], "reserved flags"),
        (gzip.compress(b"x") + b"\x1f\x8b\x08\x80" + gzip.compress(b"x")[4:], "reserved flags"),
    ],
    ids=["none", "cut off", "wrong checksum", "many members", "reserved flags", "reserved flags of the second member"],
)
def test_a_body_that_is_no_gzip_is_a_bad_request(collector: CollectorProcess, data: bytes, said: str) -> None:
    answer = request(collector.address, "/v1/traces", data, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.error.code) == (400, 3)
    assert said in answer.error.message


def test_gzip_of_several_members_is_one_body(collector: CollectorProcess) -> None:
    body = _body(1040, 1)
    halves = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert request(collector.address, "/v1/traces", halves, headers={"Content-Encoding": "gzip"}).status == 200
    assert _span_ids(collector, 1040) == [span_id(1).hex()]


@pytest.mark.parametrize(
    ("path", "method", "content_type", "headers", "status", "code"),
    [
        ("/v1/spans", "POST", PROTOBUF, {}, 404, 5),
        ("/", "GET", None, {}, 404, 5),
        ("/v1/traces", "GET", PROTOBUF, {}, 405, 12),
        ("/v1/traces", "PUT", JSON, {}, 405, 12),
        ("/metrics", "POST", PROTOBUF, {}, 405, 12),
        ("/v1/traces", "POST", "text/plain", {}, 415, 3),
        ("/v1/traces", "POST", None, {}, 415, 3),
        ("/v1/traces", "POST", PROTOBUF, {"Content-Encoding": "br"}, 415, 3),
        ("/v1/traces", "POST", PROTOBUF, {"Content-Length": str(65 * MIB)}, 413, 8),
    ],
)
def test_what_is_not_for_here_is_refused_with_its_own_status(
    collector: CollectorProcess, path: str, method: str, content_type: str | None, headers: dict[str, str], status: int, code: int
) -> None:  # fmt: skip
    answer = request(collector.address, path, b"", method=method, content_type=content_type, headers=headers)
    assert (answer.status, answer.error.code) == (status, code)
    assert answer.headers["content-type"] == (content_type if content_type in (PROTOBUF, JSON) else JSON)
    assert answer.error.message
    if status == 405:
        assert answer.headers["allow"] == ("POST" if path == "/v1/traces" else "GET, HEAD")


def test_a_request_of_64_mib_is_stored_and_one_byte_more_is_refused_for_good(collector: CollectorProcess) -> None:
    head = trace_request(span(1050, 1)).SerializeToString()
    filler = 64 * MIB - len(head)
    largest = head + _unknown_field(filler)
    assert len(largest) == 64 * MIB
    assert request(collector.address, "/v1/traces", largest).status == 200
    assert _span_ids(collector, 1050) == [span_id(1).hex()]
    compressed = {"Content-Encoding": "gzip"}
    for body, headers in (
        (largest + b"\0", {}),
        (_pieces(largest + b"\0", MIB), {}),
        (gzipped(largest + b"\0"), compressed),
    ):
        answer = request(collector.address, "/v1/traces", body, headers=headers)
        assert (answer.status, answer.error.code) == (413, 8)
        assert "retry-after" not in answer.headers
    assert request(collector.address, "/v1/traces", gzipped(largest), headers=compressed).status == 200


def _unknown_field(n_bytes: int) -> bytes:
    """`n_bytes` of valid but meaningless protobuf: field 99."""
    size = n_bytes - 2 - 4
    varint = bytes(size >> shift & 0x7F | (0x80 if shift < 21 else 0) for shift in (0, 7, 14, 21))
    return b"\x9a\x06" + varint + bytes(size)


def test_a_request_whose_rows_would_repeat_a_long_text_is_refused_for_good(collector: CollectorProcess) -> None:
    message = trace_request(*(span(1055, number) for number in range(1, 301)))
    message.resource_spans[0].scope_spans[0].scope.name = "x" * MIB
    answer = request(collector.address, "/v1/traces", message.SerializeToString())
    assert (answer.status, b"repeat more than" in answer.body) == (413, True)
    assert _span_ids(collector, 1055) == []


def test_a_decompression_bomb_is_cut_before_it_fills_memory(collector: CollectorProcess) -> None:
    before = _peak_mib(collector)
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(16 * MIB)) for _ in range(32)) + packer.flush()  # 512 MiB in 2 MiB
    answer = request(collector.address, "/v1/traces", bomb, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.error.code) == (413, 8)
    assert _peak_mib(collector) - before < 250


def _peak_mib(collector: CollectorProcess) -> float:
    status = Path(f"/proc/{collector.process.pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_want_of_disk_is_unavailable_with_the_time_to_come_back(tmp_path: Path) -> None:
    with running(tmp_path / "spans.duckdb", min_free_disk_bytes=2**62, overload_wait_s=0.2, http=ANY_PORT) as full:
        in_json = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"%s","spanId":"%s"}]}]}]}'
        as_json = in_json % (trace_id(1).hex().encode(), span_id(1).hex().encode())
        for content_type, body in ((PROTOBUF, _body(1, 1)), (JSON, as_json)):
            answer = request(full.address, "/v1/traces", body, content_type=content_type)
            assert (answer.status, answer.headers["retry-after"], answer.error.code) == (503, "10", 14)
            assert "disk" in answer.error.message
        ready = request(full.address, "/readyz", method="GET", content_type=None)
        alive = request(full.address, "/healthz", method="GET", content_type=None)
        assert (ready.status, alive.status) == (503, 200)
        page = request(full.address, "/metrics", method="GET", content_type=None).body.decode()
        assert 'trainspan_collector_refused_requests_total{reason="disk_full",transport="http"} 2.0' in page
        assert "trainspan_collector_ready 0.0" in page
        assert select(full.address, "SELECT count(*) FROM spans") == [(0,)]


def test_bodies_that_do_not_fit_into_memory_wait_and_are_then_asked_to_retry(tmp_path: Path) -> None:
    import http.client

    with running(tmp_path / "spans.duckdb", max_inflight_bytes=MIB, overload_wait_s=0.2, http=ANY_PORT) as small:
        host, _, port = str(small.address.http).rpartition(":")
        slow = http.client.HTTPConnection(host, int(port), timeout=20)
        body = _body(1, 1) + _unknown_field(MIB // 2 + 10**6)
        slow.putrequest("POST", "/v1/traces")
        slow.putheader("Content-Type", PROTOBUF)
        slow.putheader("Content-Length", str(len(body)))
        slow.endheaders(body[:-1])
        time.sleep(1)  # alone, it gets all the room; next to others it might be refused
        answer = request(small.address, "/v1/traces", _unknown_field(MIB))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "are in memory" in answer.error.message
        slow.send(body[-1:])
        assert slow.getresponse().status == 200
        slow.close()
        assert _span_ids(small, 1) == [span_id(1).hex()]


def test_a_client_that_hangs_up_half_way_leaves_nothing_and_disturbs_no_other(collector: CollectorProcess) -> None:
    body = _body(1060, 1)
    head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\nContent-Length: {len(body)}\r\n\r\n"
    assert raw(collector.address, head.encode() + body[:-1]) == b""
    chunked = head.replace(f"Content-Length: {len(body)}", "Transfer-Encoding: chunked").encode()
    raw(collector.address, chunked + b"5\r\nab")
    assert _span_ids(collector, 1060) == []
    assert request(collector.address, "/v1/traces", body).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x00" * 1_000,
    ],
)
def test_bytes_that_are_no_http_are_answered_400_and_the_next_request_is_taken(
    collector: CollectorProcess, data: bytes
) -> None:
    assert raw(collector.address, data).startswith(b"HTTP/1.1 400 ")
    assert request(collector.address, "/v1/traces", b"").status == 200


def test_headers_without_end_are_cut_off(collector: CollectorProcess) -> None:
    endless = b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 300_000
    with contextlib.suppress(ConnectionError):  # closed before everything was sent
        assert raw(collector.address, endless).startswith(b"HTTP/1.1 400 ")
    assert request(collector.address, "/v1/traces", b"").status == 200


def test_connections_are_kept_for_the_next_request(collector: CollectorProcess) -> None:
    import http.client

    host, _, port = str(collector.address.http).rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.connect()
    before = connection.sock
    for path, status in (("/v1/traces", 200), ("/v1/nothing", 404), ("/v1/logs", 200)):
        connection.request("POST", path, b"", {"Content-Type": PROTOBUF})
        response = connection.getresponse()
        assert (response.status, len(response.read()) > 0) == (status, status != 200)
        assert connection.sock is before
    connection.close()

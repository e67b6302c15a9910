"""Requests that no well-behaved exporter sends: valid ones of every kind, broken in ways that decoders trip over."""

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.support.collector.process import any_value, event, key_values, span, trace_request
from trainspan_schemas.telemetry import keys

__all__ = ["Hostile", "hostile"]

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"
_PATHS: Final = ("/v1/traces", "/v1/logs", "/v1/metrics")


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request; `body` is sent, `plain` is the same before compression, if it was compressed properly."""

    path: str
    method: str
    content_type: str
    encoding: str
    body: bytes
    plain: bytes | None


def _traces() -> bytes:
    call = {
        keys.PROMPT_TOKEN_IDS: [1, 2, 300, 2**31 - 1],
        keys.COMPLETION_TOKEN_IDS: b"\1\0\0\0",
        keys.COMPLETION_LOGPROBS: "[-0.5]",
        keys.POLICY_VERSION: 3,
        "gen_ai.headers": "x",
        "nested": {"a": [{"b": None}, 1.5, True, b"\xff"]},
        "text": "é😀\x00",
    }
    spans = [
        span(1, number, call, events=[event(keys.EVALUATION_EVENT, {keys.EVALUATION_SCORE: 1.0})]) for number in (1, 2)
    ]
    spans[0].links.add(trace_id=bytes(16), span_id=b"12345678", trace_state="a=b", flags=3)
    return trace_request(*spans, resource={"service.name": "s"}).SerializeToString()


def _logs() -> bytes:
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add(event_name=keys.EVALUATION_EVENT, flags=1)
    record.attributes.extend(
        key_values({keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: 1, "deep": {"x": {"y": []}}})
    )
    record.body.CopyFrom(any_value({"k": ["v", b"\0", None]}))
    return request.SerializeToString()


def _metrics() -> bytes:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m")
    metric.gauge.data_points.add(as_double=1.5).exemplars.add(trace_id=bytes(16), span_id=bytes(8))
    return request.SerializeToString()


_PROTOBUFS: Final = (_traces(), _logs(), _metrics())
_VALUE: Final = {"stringValue": "é"}
_ATTRIBUTES: Final[list[Any]] = [
    {"key": "a", "value": _VALUE},
    {"key": "b", "value": {"arrayValue": {"values": [{"intValue": "1"}]}}},
]
_SPAN: Final = {
    "traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1", "kind": 1, "startTimeUnixNano": "5", "attributes": _ATTRIBUTES,
    "events": [{"name": "e", "timeUnixNano": 5, "attributes": _ATTRIBUTES}], "links": [{"traceId": "0" * 32, "spanId": "1" * 16}],
    "status": {"code": 2},
}  # fmt: skip
_RECORD: Final = {"timeUnixNano": "5", "body": _VALUE, "attributes": _ATTRIBUTES, "traceId": "0" * 32}
_POINT: Final = {"asDouble": 1.5, "exemplars": [{"spanId": "00"}]}
_JSONS: Final[tuple[dict[str, Any], ...]] = (
    {
        "resourceSpans": [
            {"resource": {"attributes": _ATTRIBUTES}, "scopeSpans": [{"scope": {"name": "s"}, "spans": [_SPAN, _SPAN]}]}
        ]
    },
    {"resourceLogs": [{"scopeLogs": [{"logRecords": [_RECORD]}]}]},
    {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "m", "gauge": {"dataPoints": [_POINT]}}]}]}]},
)
_LITERALS: Final = (
    "null", "true", "0", "-1", "1e400", "1.5", "18446744073709551616", "-9223372036854775809", '"NaN"', '"\\ud800"', '"\\u0000"',
    "[]", "{}", "[[]]", '{"a":1}', '"x"', '""', "9" * 5_000, "[" * 2_000, '{"kvlistValue":' * 300, "NaN", "-Infinity", '"' + "f" * 33 + '"',
)  # fmt: skip
_BYTES: Final = (
    b"", b"\x00", b"\xff" * 10, b"\x80" * 11, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x00", b"\x0b", b"\x0c", b"\xc0\x80", b"\xed\xa0\x80",
    b"\x0a\x02\x0a\x00" * 50, bytes(range(256)), b"\x12\x80\x80\x80\x80\x80\x80\x80\x80\x80\x7f",
)  # fmt: skip


def hostile(random: Random) -> Hostile:
    """Returns one request; equal states of `random` give equal requests."""
    kind = random.randrange(3)
    as_json = random.random() < 0.4
    plain = _json(random, kind) if as_json else _protobuf(random, kind)
    made = Hostile(_PATHS[kind], "POST", JSON if as_json else PROTOBUF, "", plain, plain)
    if random.random() < 0.3:
        made = _compressed(random, made)
    if random.random() < 0.05:
        made = replace(
            made,
            path=random.choice((*_PATHS, "/", "/v1/", "/v1/traces/", "/v1/traces\x00", "//v1/traces", "/metrics")),
            method=random.choice(("POST", "GET", "PUT", "BREW", "post")),
            content_type=random.choice(
                (JSON, PROTOBUF, "", "text/plain", "application/json;;;", "a" * 500, "APPLICATION/JSON")
            ),
            encoding=random.choice(("", "gzip", "GZIP", "identity", "br", "gzip, gzip", "\xff")),
            plain=None,
        )
    return made


def _protobuf(random: Random, kind: int) -> bytes:
    body = bytearray(_PROTOBUFS[kind])
    for _ in range(random.choice((0, 1, 1, 2, 5, 20))):
        random.choice(_EDITS)(random, body)
    if random.random() < 0.02:
        return _nested(random.choice((50, 99, 120, 5_000)))
    return bytes(body)


def _flip(random: Random, body: bytearray) -> None:
    if body:
        body[random.randrange(len(body))] ^= 1 << random.randrange(8)


def _overwrite(random: Random, body: bytearray) -> None:
    if body:
        body[random.randrange(len(body))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def _cut(random: Random, body: bytearray) -> None:
    del body[random.randrange(len(body) + 1) :]


def _remove(random: Random, body: bytearray) -> None:
    start = random.randrange(len(body) + 1)
    del body[start : start + random.randrange(1, 9)]


def _insert(random: Random, body: bytearray) -> None:
    start = random.randrange(len(body) + 1)
    body[start:start] = random.choice(_BYTES)


def _repeat(random: Random, body: bytearray) -> None:
    start, end = sorted((random.randrange(len(body) + 1), random.randrange(len(body) + 1)))
    body[start:start] = body[start:end]


_EDITS: Final[tuple[Callable[[Random, bytearray], None], ...]] = (_flip, _overwrite, _cut, _remove, _insert, _repeat)


def _nested(depth: int) -> bytes:
    """Returns a span attribute with arrays nested `depth` deep."""
    value = b"\x0a\x01x"
    for _ in range(depth):
        value = b"\x2a" + _varint(len(value) + 1 + len(_varint(len(value)))) + b"\x0a" + _varint(len(value)) + value
    attribute = b"\x0a\x01k\x12" + _varint(len(value)) + value
    spans = b"\x0a\x10" + bytes(15) + b"\x01\x12\x08" + bytes(7) + b"\x01\x4a" + _varint(len(attribute)) + attribute
    for _ in range(2):
        spans = b"\x12" + _varint(len(spans)) + spans
    return b"\x0a" + _varint(len(spans)) + spans


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _json(random: Random, kind: int) -> bytes:
    text = json.dumps(_JSONS[kind], ensure_ascii=random.random() < 0.5)
    for _ in range(random.choice((0, 1, 1, 2, 4))):
        text = random.choice((_swap_value, _swap_value, _edit_text))(random, text)
    body = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        edited = bytearray(body)
        random.choice(_EDITS)(random, edited)
        body = bytes(edited)
    return body


def _swap_value(random: Random, text: str) -> str:
    """Inserts a random literal at the start of a value."""
    colons = [index for index, letter in enumerate(text) if letter == ":"]
    if not colons:
        return text
    start = random.choice(colons) + 1
    ends = [end for end in (text.find(",", start), text.find("}", start)) if end >= 0]
    return text[:start] + random.choice(_LITERALS) + text[min(ends, default=len(text)) :]


def _edit_text(random: Random, text: str) -> str:
    start = random.randrange(len(text) + 1)
    return (
        text[:start]
        + random.choice(('"', "{", "}", "[", "]", ",", "\\u12", "\ud800", "é", "\x00", " "))
        + text[start + random.randrange(3) :]
    )


def _compressed(random: Random, made: Hostile) -> Hostile:
    assert made.plain is not None
    data = gzip.compress(made.plain, 1)
    how = random.randrange(8)
    if how == 0:
        data = zlib.compress(made.plain)  # HTTP's "deflate"
    elif how == 1:
        edited = bytearray(data)
        random.choice(_EDITS)(random, edited)
        data = bytes(edited)
    elif how == 2:
        data = gzip.compress(made.plain[: len(made.plain) // 2]) + gzip.compress(made.plain[len(made.plain) // 2 :])
    elif how == 3:
        data += bytes(random.randrange(20))
    elif how == 4:
        data = gzip.compress(bytes(3_000_000), 1)
    return replace(made, encoding="gzip", body=data, plain=None)

"""OTLP as the OpenTelemetry Collector's file exporter writes it, Tempo and Jaeger: everything that a span has."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from tests.importers.reading import Read, lines, read
from trainspan_importers.traces import nanoseconds
from trainspan_schemas.telemetry import keys

TRACE, ROOT, CHILD = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
BEGIN = 1_700_000_000 * 10**9
VALUES = [
    {"key": "text", "value": {"stringValue": "é"}},
    {"key": "int", "value": {"intValue": "-9223372036854775808"}},
    {"key": "bool", "value": {"boolValue": True}},
    {"key": "double", "value": {"doubleValue": 0.1}},
    {"key": "bytes", "value": {"bytesValue": "AAE="}},
    {"key": "list", "value": {"arrayValue": {"values": [{"stringValue": "a"}, {"intValue": 1}]}}},
    {"key": "map", "value": {"kvlistValue": {"values": [{"key": "k", "value": {"stringValue": "v"}}]}}},
]
CHILD_SPAN: dict[str, Any] = {
    "traceId": TRACE,
    "spanId": CHILD,
    "parentSpanId": ROOT,
    "traceState": "a=b",
    "flags": 257,
    "name": "chat",
    "kind": 3,
    "startTimeUnixNano": str(BEGIN + 1),
    "endTimeUnixNano": str(BEGIN + 2),
    "attributes": VALUES,
    "droppedAttributesCount": 1,
    "events": [{"timeUnixNano": str(BEGIN + 1), "name": "e", "attributes": VALUES[:1], "droppedAttributesCount": 2}],
    "droppedEventsCount": 3,
    "links": [{"traceId": TRACE, "spanId": ROOT, "attributes": VALUES[:1], "flags": 1}],
    "droppedLinksCount": 4,
    "status": {"code": 2, "message": "failed"},
}
ROOT_SPAN = {
    "traceId": TRACE,
    "spanId": ROOT,
    "name": "agent",
    "kind": 2,
    "startTimeUnixNano": str(BEGIN),
    "endTimeUnixNano": str(BEGIN + 9),
    "status": {},
}
LOG = {
    "timeUnixNano": str(BEGIN + 5),
    "severityNumber": 9,
    "body": {"stringValue": "hello"},
    "attributes": VALUES[:1],
    "traceId": TRACE,
    "spanId": CHILD,
    "eventName": "gen_ai.choice",
}


def _data(*spans: dict[str, Any]) -> dict[str, Any]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]}
    scope = {"name": "lib", "version": "1", "attributes": VALUES[:1]}
    group = {"scope": scope, "spans": list(spans), "schemaUrl": "https://scope"}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [group], "schemaUrl": "https://resource"}]}


def _message(*spans: dict[str, Any]) -> bytes:
    """The same in protobuf, by protobuf's own JSON, whose ids are base64."""
    from google.protobuf.json_format import ParseDict

    data = json.loads(json.dumps(_data(*spans)))
    for span in data["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for item in (span, *span.get("links", ())):
            for name in ("traceId", "spanId", "parentSpanId"):
                if name in item:
                    item[name] = base64.b64encode(bytes.fromhex(item[name])).decode()
    return bytes(ParseDict(data, TracesData()).SerializeToString())


def _framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def _varint(number: int) -> bytes:
    assert 128 <= number < 128**2
    return bytes([number % 128 + 128, number // 128])


def _without_ours(found: Read) -> list[bytes]:
    """The spans in protobuf, without the attributes that make a rollout."""
    made = []
    for item in (one.item for one in found.spans):
        span = Span()
        span.CopyFrom(item.message)  # type: ignore[arg-type]
        kept = [pair for pair in span.attributes if not pair.key.startswith("trainspan.")]
        del span.attributes[:]
        span.attributes.extend(kept)
        made.append(span.SerializeToString(deterministic=True))
    return made


def _expected() -> list[bytes]:
    (group,) = TracesData.FromString(_message(ROOT_SPAN, CHILD_SPAN)).resource_spans[0].scope_spans
    return [span.SerializeToString(deterministic=True) for span in group.spans]


TWO_LINES = "".join(json.dumps(_data(span)) + "\n" for span in (ROOT_SPAN, CHILD_SPAN)).encode()
TWO_MESSAGES = (_message(ROOT_SPAN), _message(CHILD_SPAN))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(TWO_LINES, id="lines of JSON"),
        pytest.param(json.dumps(_data(ROOT_SPAN, CHILD_SPAN), indent=2).encode(), id="JSON over several lines"),
        pytest.param(gzip.compress(TWO_LINES), id="gzip"),
        pytest.param(pyarrow.compress(TWO_LINES, "zstd", asbytes=True), id="zstd"),
        pytest.param(_framed(*TWO_MESSAGES), id="messages after their lengths"),
        pytest.param(
            _framed(*(pyarrow.compress(one, "zstd", asbytes=True) for one in TWO_MESSAGES)), id="each in zstd"
        ),
        pytest.param(
            _framed(*(pyarrow.compress(one, "zstd", asbytes=True) for one in TWO_LINES.splitlines())),
            id="each line in zstd",
        ),
        pytest.param(_message(ROOT_SPAN, CHILD_SPAN), id="one message"),
        pytest.param(b"".join(_varint(len(one)) + one for one in TWO_MESSAGES), id="messages after varints"),
    ],
)
def test_otlp_in_every_form_keeps_every_field_of_a_span(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "traces").write_bytes(content)
    found = read(tmp_path / "traces")
    assert list(found.imported.accounts) == ["otlp"]
    assert _without_ours(found) == _expected()
    origin = found.spans[1].item.origin
    assert found.spans[1].resource == {"service.name": "shop"}
    assert origin.scope is not None
    assert (origin.scope.name, origin.scope.version, len(origin.scope.attributes)) == ("lib", "1", 1)
    assert (origin.resource_schema, origin.scope_schema) == ("https://resource", "https://scope")
    assert found.account.left_out == {}


def test_log_records_are_kept_and_metrics_are_counted(tmp_path: Path) -> None:
    logs = {"resourceLogs": [{"resource": {}, "scopeLogs": [{"scope": {}, "logRecords": [LOG]}]}]}
    found = read(lines(tmp_path / "all.json", _data(ROOT_SPAN), logs, METRICS))
    (record,) = found.records
    assert isinstance(record.item.message, LogRecord)
    assert record.item.message.body.string_value == "hello"
    assert (record.trace, record.id, record.attributes) == (TRACE, CHILD, {"text": "é", "event.name": "gen_ai.choice"})
    assert (found.account.logs, found.account.left_out) == (1, {"metrics": 2})


METRICS: dict[str, Any] = {
    "resourceMetrics": [
        {
            "scopeMetrics": [
                {
                    "metrics": [
                        {
                            "name": "a",
                            "unit": "1",
                            "gauge": {"dataPoints": [{"asInt": "7", "timeUnixNano": str(BEGIN)}]},
                        },
                        {"name": "b", "unit": "s", "sum": {"dataPoints": [{"asDouble": 0.5}]}},
                    ]
                }
            ]
        }
    ]
}


def test_the_signal_of_a_message_in_protobuf_follows_from_its_fields(tmp_path: Path) -> None:
    """A metric parses as a span and as a log record, which it is not."""
    from google.protobuf.json_format import ParseDict

    metrics = ParseDict(METRICS, MetricsData()).SerializeToString()
    logs = LogsData()
    records = logs.resource_logs.add().scope_logs.add().log_records
    records.add(observed_time_unix_nano=BEGIN).body.string_value = "x"
    (tmp_path / "all").write_bytes(_framed(metrics, _message(ROOT_SPAN), logs.SerializeToString(), b"\x50\x01"))
    found = read(tmp_path / "all")
    assert [span.name for span in found.spans] == ["agent"]
    assert [one.item.message.body.string_value for one in found.records] == ["x"]
    assert found.account.left_out == {"metrics": 2, "broken": 1}


@pytest.mark.parametrize("broken", [{"traceId": "ab" * 7}, {"spanId": "00" * 8}, {"parentSpanId": "ab" * 7}])
def test_a_bad_id_costs_only_its_span(tmp_path: Path, broken: dict[str, str]) -> None:
    spans = [ROOT_SPAN, {**CHILD_SPAN, **broken}, {**CHILD_SPAN, "spanId": CHILD[::-1]}]
    (tmp_path / "message").write_bytes(_message(*spans))
    for path in (tmp_path / "message", lines(tmp_path / "lines", _data(*spans))):
        found = read(path)
        assert [span.name for span in found.spans] == ["agent", "chat"]
        assert (found.account.left_out, found.account.rollouts) == ({"broken": 1}, 1)


def test_a_bad_attribute_of_a_resource_or_scope_costs_only_what_has_it(tmp_path: Path) -> None:
    def group(**more: Any) -> dict[str, Any]:
        return {"resource": {}, "scopeSpans": [{"spans": [CHILD_SPAN]}], **more}

    bad = {"attributes": [{"key": 7, "value": {}}]}
    broken_scope = [{"scope": bad, "spans": [CHILD_SPAN]}, {"spans": [CHILD_SPAN]}]
    groups = [group(), group(resource=bad), group(scopeSpans=broken_scope), group()]
    found = read(lines(tmp_path / "traces.json", {"resourceSpans": groups}))
    assert (len(found.spans), found.account.left_out["broken"]) == (3, 2)


def test_a_trace_with_two_roots_is_one_rollout(tmp_path: Path) -> None:
    """Its end is the first root's, and the reward for all files comes once."""
    second = {**ROOT_SPAN, "spanId": ROOT[::-1], "status": {"code": 2}}
    found = read(lines(tmp_path / "one.json", _data(ROOT_SPAN, second)), reward=0.5)
    assert [span.attributes.get(keys.ROLLOUT_STATUS) for span in found.spans] == ["ok", None]
    assert [span.attributes[keys.ROLLOUT_ID] for span in found.spans] == [TRACE, TRACE]
    assert (found.account.rollouts, found.account.evaluations) == (1, 1)
    own = {**CHILD_SPAN, "attributes": [{"key": keys.ROLLOUT_ID, "value": {"stringValue": "r"}}]}
    assert read(lines(tmp_path / "own.json", _data(ROOT_SPAN, second, own))).account.own_rollouts == 1


def test_a_trace_whose_spans_name_their_rollout_is_left_as_it_is(tmp_path: Path) -> None:
    """The one that does may come after the root, in another file."""
    own = {**CHILD_SPAN, "attributes": [{"key": keys.ROLLOUT_ID, "value": {"stringValue": "r"}}]}
    other = {**ROOT_SPAN, "traceId": TRACE[::-1]}
    found = read(lines(tmp_path / "a.json", _data(ROOT_SPAN, other)), lines(tmp_path / "b.json", _data(own)))
    assert [root.trace for root in found.roots] == [TRACE[::-1]]
    assert (found.account.rollouts, found.account.own_rollouts) == (1, 1)


def test_a_reward_for_all_files_is_an_evaluation_of_each_new_rollout(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "one.json", _data(ROOT_SPAN)), reward=0.5)
    (reward,) = found.records
    assert (reward.trace, reward.id, reward.start_ns) == (TRACE, "", BEGIN + 9)
    expected = {keys.EVALUATION_NAME: keys.REWARD, keys.EVALUATION_SCORE: 0.5, keys.EVALUATION_SOURCE: "human"}
    assert expected.items() <= reward.attributes.items()
    assert (found.account.rollouts, found.account.evaluations) == (1, 1)


def test_a_trace_without_its_root_is_counted(tmp_path: Path) -> None:
    found = read(lines(tmp_path / "a.json", _data(CHILD_SPAN)))
    assert (found.account.spans, found.account.rollouts, found.account.left_out) == (1, 0, {"no_root": 1})
    found = read(lines(tmp_path / "a.json", _data(CHILD_SPAN, ROOT_SPAN)))
    assert (found.account.rollouts, found.account.left_out) == (1, {})


def test_a_broken_span_costs_only_itself(tmp_path: Path) -> None:
    bad = [
        {**CHILD_SPAN, "spanId": "00"},
        {**CHILD_SPAN, "startTimeUnixNano": "soon"},
        {**CHILD_SPAN, "attributes": [{}]},
    ]
    path = lines(tmp_path / "a.json", _data(ROOT_SPAN), _data(*bad, CHILD_SPAN), '{"resourceSpans": 1}')
    found = read(path)
    assert _without_ours(found) == _expected()
    assert found.account.left_out == {"broken": 4}
    assert found.account.examples[0] == f"{path}:2: spanId is '00'"
    assert [example.partition(": ")[0] for example in found.account.examples] == [f"{path}:2"] * 3 + [f"{path}:3"]


@pytest.mark.parametrize("outer", ["batches", "trace"])
def test_tempo_has_ids_in_base64_and_names_of_enumerations(tmp_path: Path, outer: str) -> None:
    span = {
        **CHILD_SPAN,
        **{
            name: base64.b64encode(bytes.fromhex(CHILD_SPAN[name])).decode()
            for name in ("traceId", "spanId", "parentSpanId")
        },
        "kind": "SPAN_KIND_CLIENT",
        "status": {"code": "STATUS_CODE_ERROR", "message": "failed"},
    }
    data = _data(ROOT_SPAN, span)
    answer = {"batches": data["resourceSpans"]} if outer == "batches" else {"trace": data}
    (tmp_path / "tempo.json").write_text(json.dumps(answer))
    found = read(tmp_path / "tempo.json")
    assert list(found.imported.accounts) == ["tempo"]
    assert _without_ours(found) == _expected()


JAEGER = {
    "data": [
        {
            "traceID": TRACE[1:],
            "spans": [
                {
                    "traceID": TRACE[1:],
                    "spanID": CHILD[2:],
                    "flags": 1,
                    "operationName": "chat",
                    "references": [
                        {"refType": "CHILD_OF", "traceID": TRACE[1:], "spanID": ROOT},
                        {"refType": "FOLLOWS_FROM", "traceID": TRACE[1:], "spanID": ROOT},
                    ],
                    "startTime": 1_700_000_000_000_001,
                    "duration": 2,
                    "tags": [
                        {"key": "span.kind", "type": "string", "value": "client"},
                        {"key": "n", "type": "int64", "value": "7"},
                        {"key": "x", "type": "float64", "value": 1},
                        {"key": "b", "type": "binary", "value": "AAE="},
                        {"key": "error", "type": "bool", "value": True},
                        {"key": "otel.status_description", "type": "string", "value": "503"},
                        {"key": "otel.scope.name", "type": "string", "value": "lib"},
                    ],
                    "logs": [
                        {
                            "timestamp": 1_700_000_000_000_002,
                            "fields": [
                                {"key": "event", "type": "string", "value": "e"},
                                {"key": "k", "type": "bool", "value": "true"},
                            ],
                        }
                    ],
                    "processID": "p1",
                    "warnings": ["clock skew"],
                },
                {
                    "traceID": TRACE[1:],
                    "spanID": ROOT,
                    "operationName": "agent",
                    "startTime": 1_700_000_000_000_000,
                    "duration": 9,
                    "processID": "p1",
                },
            ],
            "processes": {"p1": {"serviceName": "shop", "tags": [{"key": "host", "type": "string", "value": "h"}]}},
        }
    ],
    "total": 0,
}


def test_jaeger_keeps_tags_logs_references_and_processes(tmp_path: Path) -> None:
    (tmp_path / "jaeger.json").write_text(json.dumps(JAEGER, indent=1))
    found = read(tmp_path / "jaeger.json")
    child, root = found.spans
    assert (child.trace, child.id, child.parent) == (TRACE, CHILD, ROOT)
    assert (child.start_ns, child.end_ns, child.failed) == (BEGIN + 1000, BEGIN + 3000, "503")
    assert child.attributes == {"n": 7, "x": 1.0, "b": b"\0\1", "jaeger.warnings": ["clock skew"]}
    span = child.item.message
    assert isinstance(span, Span)
    assert span.kind == Span.SPAN_KIND_CLIENT
    assert [(event.name, event.time_unix_nano) for event in span.events] == [("e", BEGIN + 2000)]
    assert [link.span_id.hex() for link in span.links] == [ROOT]
    assert child.resource == {"service.name": "shop", "host": "h"}
    assert child.item.origin.scope is not None
    assert child.item.origin.scope.name == "lib"
    assert found.roots == [root]
    assert found.account.left_out == {}


@pytest.mark.parametrize(
    ("value", "ns"),
    [
        (1_700_000_000, BEGIN),
        (1_700_000_000_001, BEGIN + 1_000_000),
        (1_700_000_000_000_001, BEGIN + 1_000),
        (BEGIN + 1, BEGIN + 1),
        (1_700_000_000.25, round(1_700_000_000.25 * 10**9)),  # to the digits of a float
        ("1700000000001", BEGIN + 1_000_000),
        ("2023-11-14T22:13:20.123456789Z", BEGIN + 123_456_789),
        ("2023-11-14T22:13:20,1234567Z", BEGIN + 123_456_700),
        ("20231114T221320.123456789Z", BEGIN + 123_456_789),
        ("2023-11-14 22:13:20.5 UTC", BEGIN + 500_000_000),
        ("2023-11-15T00:13:20+02:00", BEGIN),
        ("2023-11-14T22:13:20", BEGIN),
    ],
)
def test_a_time_is_read_in_each_unit_and_form(value: object, ns: int) -> None:
    assert nanoseconds(value, "start") == ns

"""Recordings by real instrumentations (golden/*.json, with their versions), as rollouts to send; made by golden/record.py."""

import base64
import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from tests.processing.support.traces import TestRollout, hex_id
from trainspan_schemas.telemetry.identity import TraceParent
from trainspan_serving.export.call_span import encode_attributes

FOLDER = Path(__file__).parent / "golden"
DIALECTS = ("official", "official_event", "official_messages", "traceloop", "traceloop_flat", "openinference", "mixed")


class _Recorded:
    """A recorded span in the form expected by `send`."""

    def __init__(self, span: Span, service: str) -> None:
        self._span, self._service = span, service

    def proto(self) -> ResourceSpans:
        resource = Resource(attributes=encode_attributes({"service.name": self._service}))
        return ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=[self._span])])


class Recording(TestRollout):
    """One recorded run under a runner's rollout span; new ids are derived from the rollout's."""

    __test__ = False

    def replay(self, dialect: str, *, service: str = "calculator") -> "Recording":
        """Adds the recorded spans of the client."""
        golden = json.loads((FOLDER / f"{dialect}.json").read_text())
        self.served: list[dict[str, Any]] = golden["served"]
        self._dialect = dialect
        first = min(int(raw["startTimeUnixNano"]) for raw in golden["spans"])
        self._run = next(raw["traceId"] for raw in golden["spans"] if raw["name"] == "run")
        for raw in golden["spans"]:
            span = ParseDict({key: value for key, value in raw.items() if key != "scope"}, Span())
            span.trace_id = self._trace(raw["traceId"])
            parent = raw.get("parentSpanId")
            is_apart = raw["traceId"] != self._run
            above = self._id(base64.b64decode(parent).hex()) if parent else "" if is_apart else self.root
            span.parent_span_id = bytes.fromhex(above)
            for link, said in zip(span.links, raw.get("links", ()), strict=True):
                link.trace_id = self._trace(said["traceId"])
                link.span_id = bytes.fromhex(self._id(link.span_id.hex()))
            span.span_id = bytes.fromhex(self._id(base64.b64decode(raw["spanId"]).hex()))
            offset = 1_700_000_001 * 1_000_000_000 - first
            span.start_time_unix_nano += offset
            span.end_time_unix_nano += offset
            for pair in span.attributes:
                self._rename_response(pair)
            if not is_apart:
                span.attributes.extend(encode_attributes(self.identity()))
            self.spans.append(_Recorded(span, service))  # type: ignore[arg-type]
        for said in golden.get("logs", ()):
            record = ParseDict(said, LogRecord())
            record.trace_id, record.span_id = (
                self._trace(said["traceId"]),
                bytes.fromhex(self._id(record.span_id.hex())),
            )
            for pair in record.attributes:
                self._rename_response(pair)
            self.logs.append(record)
        return self

    def _trace(self, recorded: str) -> bytes:
        """The rollout's trace for the run's, and a separate trace for each other one."""
        return bytes.fromhex(self.trace_id if recorded == self._run else hex_id(32, self.rollout_id, recorded))

    def serve(self, **more: Any) -> "Recording":
        """Adds the policy server's record of the same requests."""
        for index, request in enumerate(self.served):
            caller = TraceParent.parse(request["traceparent"])
            assert caller is not None
            for choice, tokens in enumerate(request["choices"]):
                self.call(
                    index,
                    request["prompt_ids"],
                    tokens["completion_ids"],
                    at=1.0 + index,
                    parent=self._id(caller.span_id),
                    logprobs=tokens["logprobs"],
                    gen_ai__response__id=self._response(request["response_id"]),
                    trainspan__choice__index=choice,
                    **more,
                )
        return self

    def _id(self, recorded: str) -> str:
        return hex_id(16, self.rollout_id, self._dialect, recorded)

    def _response(self, recorded: str) -> str:
        """A new response id for each replay: they must be unique in a store."""
        return f"{recorded}-{hex_id(8, self.rollout_id)}"

    def _rename_response(self, pair: KeyValue) -> None:
        if pair.key in ("gen_ai.response.id", "output.value"):
            text = pair.value.string_value
            for request in self.served:
                text = text.replace(request["response_id"], self._response(request["response_id"]))
            pair.value.string_value = text

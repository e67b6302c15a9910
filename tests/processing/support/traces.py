"""Traces as an agent and the policy server would send them, with ids and clocks fixed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from tests.support.collector.process import runner_metadata
from trainspan_processing.rewards.definition import reward_definition
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.tokens import encode_ids, encode_logprobs
from trainspan_serving.export.call_span import encode_attributes

SECOND = 1_000_000_000
START_NS = 1_700_000_000 * SECOND


def hex_id(length: int, *parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:length]


@dataclass
class TestSpan:
    """One span; `start` and `end` in seconds since START_NS."""

    __test__ = False

    trace_id: str
    span_id: str
    parent: str | None
    start: float
    end: float
    attributes: dict[str, Any]
    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    failed: bool = False
    message: str = ""
    dropped_attributes: int = 0
    service: str = "agent"
    flags: int = 0
    kind: Span.SpanKind.ValueType = Span.SPAN_KIND_UNSPECIFIED

    def proto(self) -> ResourceSpans:
        span = Span(
            trace_id=bytes.fromhex(self.trace_id),
            span_id=bytes.fromhex(self.span_id),
            parent_span_id=bytes.fromhex(self.parent or ""),
            name="any",
            kind=self.kind,
            start_time_unix_nano=_ns(self.start),
            end_time_unix_nano=_ns(self.end),
            attributes=encode_attributes(self.attributes),
            dropped_attributes_count=self.dropped_attributes,
            flags=self.flags,
            status=Status(code=Status.StatusCode.STATUS_CODE_ERROR, message=self.message) if self.failed else Status(),
            events=[
                Span.Event(
                    time_unix_nano=_ns(time), name=keys.EVALUATION_EVENT, attributes=encode_attributes(attributes)
                )
                for time, attributes in self.events
            ],
        )
        resource = Resource(attributes=encode_attributes({"service.name": self.service}))
        return ResourceSpans(resource=resource, scope_spans=[ScopeSpans(spans=[span])])


@dataclass
class TestRollout:
    """One rollout: a rollout span `root`, and anything that a test adds, in its own trace."""

    __test__ = False

    rollout_id: str
    task: str | None = "t0"
    run: str | None = "run"
    round: int | None = 0
    attempt: int = 0
    split: str = "train"
    status: str | None = "ok"
    begins: float = 0.0
    seconds: float = 100.0
    stated_calls: int | None = None
    judge: str | None = None
    spans: list[TestSpan] = field(default_factory=list)
    logs: list[LogRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root: str = hex_id(16, self.rollout_id, self.attempt, "root")
        facts = {
            keys.ROLLOUT_STATUS: self.status,
            keys.ROLLOUT_CALLS: self.stated_calls,
            keys.ROLLOUT_JUDGE: self.judge,
        }
        given = {key: value for key, value in facts.items() if value is not None}
        attributes = {keys.ROLLOUT_BOUNDARY: "runner", **self.identity(), **given}
        self.root_span = TestSpan(self.trace_id, self.root, None, self.begins, self.begins + self.seconds, attributes)
        if self.status is not None:
            self.spans.append(self.root_span)

    @property
    def trace_id(self) -> str:
        return hex_id(32, self.rollout_id, self.attempt)

    def identity(self) -> dict[str, Any]:
        split: Any = self.split
        return Identity(self.rollout_id, self.run, self.task, self.attempt, self.round, split).attributes()

    def reward(self, score: float, *, on: str | None = None, at: float = 99.0, **more: Any) -> "TestRollout":
        """An evaluation event on the span `on`, by default the rollout span."""
        attributes = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: float(score), **more}
        span = next(span for span in self.spans if span.span_id == (on or self.root))
        span.events.append((self.begins + at, attributes))
        return self

    def span(self, name: str, start: float, end: float, *, parent: str | None = None, **attributes: Any) -> str:
        """Any span of the agent; dots in keys are written as `__`."""
        plain = {key.replace("__", "."): value for key, value in attributes.items()}
        span_id = hex_id(16, self.rollout_id, self.attempt, name)
        self.spans.append(
            TestSpan(
                self.trace_id,
                span_id,
                parent or self.root,
                self.begins + start,
                self.begins + end,
                {**self.identity(), **plain},
            )
        )
        return span_id

    def call(
        self,
        index: int | None,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        at: float | None = None,
        parent: str | None = None,
        agent: str | None = None,
        version: int = 0,
        logprobs: Sequence[float] | None = None,
        **more: Any,
    ) -> str:
        """A call span of the policy server. `more` are attributes, dots written as `__`; None removes one."""
        start = self.begins + (at if at is not None else 1.0 + (index or 0))
        response = f"chatcmpl-{hex_id(12, self.rollout_id, self.attempt, index, at, tuple(prompt), more)}"
        attributes: dict[str, Any] = {
            **self.identity(),
            keys.GEN_AI_OPERATION: "chat",
            keys.GEN_AI_REQUEST_MODEL: "policy",
            keys.GEN_AI_RESPONSE_ID: response,
            keys.GEN_AI_FINISH_REASONS: ["stop"],
            keys.GEN_AI_TEMPERATURE: 1.0,
            keys.GEN_AI_TOP_P: 1.0,
            keys.GEN_AI_TOP_K: 0,
            keys.GEN_AI_MIN_P: 0.0,
            keys.GEN_AI_FREQUENCY_PENALTY: 0.0,
            keys.GEN_AI_PRESENCE_PENALTY: 0.0,
            keys.GEN_AI_REPETITION_PENALTY: 1.0,
            keys.LOGPROBS_MODE: "processed",
            keys.POLICY_NAME: "policy",
            keys.POLICY_VERSION: version,
            keys.CALL_DELIVERED: True,
            keys.CHOICE_INDEX: 0,
            keys.PROMPT_TOKEN_IDS: encode_ids(prompt),
            keys.COMPLETION_TOKEN_IDS: encode_ids(completion),
            keys.COMPLETION_LOGPROBS: encode_logprobs(logprobs if logprobs is not None else [-0.5] * len(completion)),
        }
        if index is not None:
            attributes[keys.CALL_INDEX] = index
        if agent is not None:
            attributes[keys.GEN_AI_AGENT_NAME] = agent
        dropped = more.pop("dropped_attributes", 0)
        attributes |= {key.replace("__", "."): value for key, value in more.items()}
        span_id = hex_id(16, response, "server")
        self.spans.append(
            TestSpan(
                self.trace_id,
                span_id,
                parent or self.root,
                start,
                start + 0.5,
                {key: value for key, value in attributes.items() if value is not None},
                dropped_attributes=dropped,
                service="policy-server",
            )
        )
        return span_id

    def log_reward(self, score: float, *, span_id: str | None = None, at: float, **more: Any) -> "TestRollout":
        """An evaluation as a log record; without `span_id` it is bound by rollout id alone."""
        attributes = {keys.EVALUATION_NAME: "reward", keys.EVALUATION_SCORE: float(score), **more}
        attributes[keys.EVALUATION_ID] = hex_id(16, self.rollout_id, span_id, at, score)
        if span_id is None:
            attributes[keys.ROLLOUT_ID] = self.rollout_id
        self.logs.append(
            LogRecord(
                time_unix_nano=_ns(self.begins + at),
                event_name=keys.EVALUATION_EVENT,
                trace_id=bytes.fromhex(self.trace_id) if span_id else b"",
                span_id=bytes.fromhex(span_id or ""),
                attributes=encode_attributes(attributes),
            )
        )
        return self


def measured_with(*policies: str, **settings: Any) -> dict[str, Any]:
    """What a measurement says of itself: the policies, `NAME VERSION`, and the reward by these settings of the dataset."""
    reward = reward_definition(DatasetSettings(**settings))
    return {keys.MEASURED_POLICIES: list(policies), keys.MEASURED_REWARD: list(reward)}


def chain(rollout: TestRollout, turns: int, *, width: int = 5) -> TestRollout:
    """A conversation: every call's prompt extends the previous sequence by one environment token."""
    sequence = [1, 2, 3]
    for turn in range(turns):
        completion = list(range(10 * turn + 10, 10 * turn + 10 + width))
        rollout.call(turn, sequence, completion)
        sequence = [*sequence, *completion, 7]
    return rollout


def _ns(seconds: float) -> int:
    return START_NS + round(seconds * 1000) * 1_000_000


def send(address: str, rollouts: Sequence[TestRollout], token: str | None = None) -> None:
    """Exports all spans and log records to an OTLP/gRPC receiver at HOST:PORT; `token` None: the runner's, "": none."""
    metadata = runner_metadata(address) if token is None else [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        spans = [span.proto() for rollout in rollouts for span in rollout.spans]
        TraceServiceStub(channel).Export(ExportTraceServiceRequest(resource_spans=spans), timeout=30, metadata=metadata)
        if records := [record for rollout in rollouts for record in rollout.logs]:
            logs = ResourceLogs(scope_logs=[ScopeLogs(log_records=records)])
            LogsServiceStub(channel).Export(
                ExportLogsServiceRequest(resource_logs=[logs]), timeout=30, metadata=metadata
            )

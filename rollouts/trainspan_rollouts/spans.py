"""The rollout spans, which the runner owns: ids known before the agent starts, verdicts on them at the end."""

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from logging import CRITICAL, getLogger
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, Status, StatusCode

from trainspan_schemas import keys
from trainspan_schemas.identity import Identity, TraceParent
from trainspan_schemas.status import RolloutStatus

__all__ = ["RolloutSpan", "RolloutSpans"]

EXPORT_TIMEOUT_S: Final = 5.0
MAX_QUEUE: Final = 65536
"""Rollout spans held while the collector is slow."""


class RolloutSpans:
    """Begins rollout spans and exports them over OTLP/gRPC; counts those that could not be delivered."""

    def __init__(self, collector: str, headers: str | None, on_delivered: Callable[[str, int], None]) -> None:
        """`headers` as in OTEL_EXPORTER_OTLP_HEADERS, None: those; `on_delivered(rollout id, attempt)` in a thread."""
        getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(CRITICAL)  # `close` tells the loss
        exporter = OTLPSpanExporter(endpoint=collector, timeout=EXPORT_TIMEOUT_S, headers=headers)
        self._exporter = _WatchedExporter(exporter, on_delivered)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": "trainspan-rollout"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=MAX_QUEUE, schedule_delay_millis=200, max_export_batch_size=256
            )
        )
        self._tracer = self._provider.get_tracer("trainspan_rollouts")

    def begin(self, identity: Identity, group_size: int) -> "RolloutSpan":
        """The span of one attempt at one of `group_size` rollouts of its task, the root of a trace of its own."""
        attributes = {**identity.attributes(), keys.GROUP_SIZE: group_size}
        return RolloutSpan(self._tracer.start_span(keys.ROLLOUT_SPAN_NAME, Context(), attributes=attributes), identity)

    def close(self) -> int:
        """Sends what is left; the number of spans lost in all."""
        self._provider.shutdown()
        return self._exporter.lost


class RolloutSpan:
    """The span of one attempt at one rollout."""

    def __init__(self, span: Span, identity: Identity) -> None:
        self._span = span
        self.identity = identity

    @property
    def parent(self) -> TraceParent:
        """What the agent's spans hang under."""
        context = self._span.get_span_context()
        return TraceParent(f"{context.trace_id:032x}", f"{context.span_id:016x}")

    def end(
        self,
        status: RolloutStatus,
        *,
        calls: int | None = None,
        judge: str | None = None,
        scores: Mapping[str, float] | None = None,
        source: str = "judge",
        error: str | None = None,
    ) -> None:
        """Ends it with its verdict: each score an event `gen_ai.evaluation.result`."""
        attributes: dict[str, str | int | None] = {
            keys.ROLLOUT_STATUS: status,
            keys.ROLLOUT_BOUNDARY: "runner",
            keys.ROLLOUT_CALLS: calls,
            keys.ROLLOUT_JUDGE: judge,
        }
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        for name, score in (scores or {}).items():
            self._span.add_event(
                keys.EVALUATION_EVENT,
                {
                    keys.EVALUATION_NAME: name,
                    keys.EVALUATION_SCORE: score,
                    keys.EVALUATION_ID: uuid.uuid4().hex,
                    keys.EVALUATION_SOURCE: source,
                    keys.EVALUATION_OF: "rollout",
                },
            )
        if status != "ok":
            self._span.set_status(Status(StatusCode.ERROR, error or status))
        self._span.end()


class _WatchedExporter(SpanExporter):
    """Counts what is lost and tells what has arrived."""

    def __init__(self, exporter: SpanExporter, on_delivered: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._on_delivered = on_delivered
        self._lock = threading.Lock()
        self.lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            with self._lock:
                self.lost += len(spans)
            return result
        for span in spans:
            attributes = span.attributes or {}
            self._on_delivered(str(attributes[keys.ROLLOUT_ID]), int(str(attributes[keys.ATTEMPT])))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)

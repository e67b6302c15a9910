"""The rollout spans, which the runner owns: ids before the agent starts, verdicts at the end."""

import json
import os
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from trainspan_rollouts.delivery import VerdictSenders
from trainspan_rollouts.ledger.run_ledger import RunLedger
from trainspan_schemas.artifacts.branches import BranchPoint
from trainspan_schemas.errors import UsageError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.store.collectors import Collectors
from trainspan_schemas.telemetry import keys
from trainspan_schemas.telemetry.identity import Identity, TraceParent
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["RolloutSpan", "RolloutSpans"]

MAX_ERROR_BYTES: Final = 8 * 1024
"""Longer error texts are cut: an agent's or a judge's may have any length."""
MAX_ANSWER_CHARACTERS: Final = 32 * 1024
"""Of JSON. A longer answer of a task is not stored: each of its rollouts would have it."""
_MAX_REASONS_BYTES: Final = 2 * 1024 * 1024
"""Of all reasons of a verdict, so that it stays below the 4 MiB that gRPC servers take by default."""
_WHOLE: Final = SpanLimits(
    **dict.fromkeys(
        (
            *("max_attributes", "max_events", "max_links", "max_span_attributes", "max_event_attributes"),
            *("max_link_attributes", "max_attribute_length", "max_span_attribute_length"),
        ),
        SpanLimits.UNSET,
    )
)
"""A verdict is sent whole: the SDK's limits would drop the first scores of many, and those in the environment cut ids."""
_RESOURCE: Final = Resource.create({"service.name": "trainspan-rollout"})


class RolloutSpans:
    """Starts rollout spans and delivers them over OTLP/gRPC, undelivered ones of earlier processes of the run first."""

    def __init__(
        self,
        collectors: Collectors,
        headers: Callable[[str], str | None],
        ledger: RunLedger,
        **options: Callable[[str], str],
    ) -> None:
        """Arguments and `options` as for VerdictSenders. Raises UsageError if the environment switches OpenTelemetry off."""
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            raise UsageError(
                "OTEL_SDK_DISABLED is true: neither this runner nor its agents could send a span; unset it"
            )
        self._sender = VerdictSenders(
            collectors,
            headers,
            on_delivered=lambda span: ledger.delivered(*_attempt(span)),
            on_waiting=lambda span: ledger.waits(*_attempt(span), _to_record(span)),
            **options,
        )
        self._sender.resend([_from_record(record) for record in ledger.undelivered()])
        self._ids = _SecretIds(collectors)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=_RESOURCE,
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=_WHOLE,
        )
        self._provider.add_span_processor(self._sender)
        self._tracer = self._provider.get_tracer("trainspan_rollouts")

    def begin_rollout(
        self, identity: Identity, group_size: int, point: BranchPoint | None = None, answer: Any = None
    ) -> "RolloutSpan":
        """Starts the span of one attempt at one of `group_size` rollouts of its task, or branches at `point`.

        It is the root of a new trace, and states the task's `answer` if that is short.
        """
        attributes = {**identity.attributes(), keys.GROUP_SIZE: group_size, keys.ROLLOUT_SIGNED: True}
        if answer is not None and len(text := json.dumps(answer)) <= MAX_ANSWER_CHARACTERS:
            attributes[keys.TASK_ANSWER] = text
        if point is not None:
            branch_call = {keys.BRANCH_ATTEMPT: point.attempt, keys.BRANCH_CALL: point.call}
            attributes |= {keys.BRANCH_OF: point.rollout_id, **branch_call}
        self._ids.rollout_id = identity.rollout_id
        return RolloutSpan(self._tracer.start_span(keys.ROLLOUT_SPAN_NAME, Context(), attributes=attributes), identity)

    def close(self, timeout_s: float) -> int:
        """Sends the rest for up to `timeout_s`; returns the number of verdicts that were not acknowledged."""
        return self._sender.close(timeout_s)


class _SecretIds(IdGenerator):
    """Generates unguessable ids, even from known ones: only a holder of a rollout's trace can send rewards in it.

    A trace id belongs to the same collector as `rollout_id`, for senders that know only the trace, such as the policy
    server for an agent that has its rollout in a URL.
    """

    def __init__(self, collectors: Collectors) -> None:
        self._collectors = collectors
        self.rollout_id = ""
        """The rollout of the next trace."""

    def generate_trace_id(self) -> int:
        wanted = self._collectors.url_for(self.rollout_id)
        while True:
            trace_id = secrets.randbits(128) or 1
            if self._collectors.url_for(f"{trace_id:032x}") == wanted:
                return trace_id

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1


class RolloutSpan:
    """The span of one attempt at one rollout."""

    def __init__(self, span: Span, identity: Identity) -> None:
        self._span = span
        self.identity = identity

    @property
    def parent(self) -> TraceParent:
        """The parent of the agent's spans."""
        context = self._span.get_span_context()
        return TraceParent(f"{context.trace_id:032x}", f"{context.span_id:016x}")

    def if_killed(self, judge: str | None) -> JsonObject:
        """The record of the span that ends the attempt if this process is killed: nobody sees when, so it ends as it begins.

        A verdict that the collector has got nevertheless ended later, and stays in its place.
        """
        assert isinstance(self._span, ReadableSpan)
        record = _to_record(self._span)
        attributes = _verdict_attributes("cancelled", judge) | record["attributes"]
        attributes.pop(keys.TASK_ANSWER, None)
        return record | {"end_ns": record["start_ns"], "attributes": attributes, "error": "its runner was killed"}

    def end(
        self,
        status: RolloutStatus,
        *,
        calls: int | None = None,
        served_calls: int | None = None,
        judge: str | None = None,
        scores: Mapping[str, float] | None = None,
        source: str = "judge",
        error: str | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> None:
        """Ends it with its verdict, with each score as an event `gen_ai.evaluation.result`, explained by its reason."""
        counts = {keys.ROLLOUT_CALLS: calls, keys.SERVED_CALLS: served_calls}
        self._span.set_attributes(_verdict_attributes(status, judge))
        self._span.set_attributes({key: count for key, count in counts.items() if count is not None})
        most_bytes = min(MAX_ERROR_BYTES, _MAX_REASONS_BYTES // max(1, len(scores or ())))
        for name, score in (scores or {}).items():
            reason = (reasons or {}).get(name)
            self._span.add_event(
                keys.EVALUATION_EVENT,
                {
                    keys.EVALUATION_NAME: name,
                    keys.EVALUATION_SCORE: score,
                    keys.EVALUATION_ID: uuid.uuid4().hex,
                    keys.EVALUATION_SOURCE: source,
                    keys.EVALUATION_OF: "rollout",
                    **({keys.EVALUATION_EXPLANATION: _cut(reason, most_bytes)} if reason else {}),
                },
            )
        if status != "ok":
            self._span.set_status(Status(StatusCode.ERROR, _cut(error or status)))
        began = self._span.start_time if isinstance(self._span, ReadableSpan) else None
        self._span.end(
            max(time.time_ns(), (began or 0) + 1000)
        )  # later than `if_killed`, also if the clock was set back


def _verdict_attributes(status: RolloutStatus, judge: str | None) -> dict[str, str | bool]:
    judged = {keys.ROLLOUT_JUDGE: judge} if judge is not None else {keys.ROLLOUT_OWN_REWARD: True}
    return {keys.ROLLOUT_STATUS: status, keys.ROLLOUT_BOUNDARY: "runner", **judged}


def _cut(text: str, most_bytes: int = MAX_ERROR_BYTES) -> str:
    """Returns the text in at most so many bytes of UTF-8; an agent's text may contain lone surrogates."""
    data = text[:most_bytes].encode(errors="replace")
    return data[:most_bytes].decode(errors="ignore")


def _attempt(span: ReadableSpan) -> tuple[str, int]:
    attributes = span.attributes or {}
    return str(attributes[keys.ROLLOUT_ID]), int(str(attributes[keys.ATTEMPT]))


def _to_record(span: ReadableSpan) -> JsonObject:
    """Returns the span as JSON for the ledger."""
    context = span.context
    assert context is not None
    return {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "events": [[event.timestamp, dict(event.attributes or {})] for event in span.events],
        "error": span.status.description if span.status.status_code is StatusCode.ERROR else None,
    }


def _from_record(record: Mapping[str, Any]) -> ReadableSpan:
    error = record["error"]
    return ReadableSpan(
        name=keys.ROLLOUT_SPAN_NAME,
        context=SpanContext(
            int(record["trace_id"], 16), int(record["span_id"], 16), is_remote=False, trace_flags=TraceFlags(1)
        ),
        resource=_RESOURCE,
        attributes=record["attributes"],
        events=[Event(keys.EVALUATION_EVENT, attributes, time_ns) for time_ns, attributes in record["events"]],
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, _cut(error)),
        start_time=record["start_ns"],
        end_time=record["end_ns"],
    )

"""Feedback on finished rollouts, responses and calls, sent as evaluation records over OTLP/gRPC."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from trainspan_schemas.errors import ConfigError, StoreError
from trainspan_schemas.store.labels import Label
from trainspan_schemas.telemetry import keys

__all__ = ["FeedbackScore", "send_scores"]

_TIMEOUT_S: Final = 10.0
_RECORDS_PER_REQUEST: Final = 1000

Value = str | int | float | Sequence[str]
"""Of an attribute."""


@dataclass(frozen=True, slots=True)
class FeedbackScore:
    """One score; exactly one of `rollout_id` and `response_id` is set."""

    value: float | None
    """None: it takes a label back."""
    name: str
    source: str
    rollout_id: str | None = None
    response_id: str | None = None
    explanation: str | None = None
    span: tuple[str, str] | None = None
    """Trace and span id of the call that it is about, in the rollout."""
    more: Mapping[str, Value | None] = field(default_factory=dict)
    """Further attributes; those that are None are left out."""
    evaluation_id: str | None = None
    """Of scores with the same id only the first counts; None: an id of its own."""
    time_ns: int | None = None
    """None: when it is sent."""

    @classmethod
    def of_label(cls, label: Label) -> "FeedbackScore":
        return cls(
            label.score,
            label.name,
            keys.LABEL,
            rollout_id=label.rollout_id,
            explanation=label.reason,
            span=label.span,
            more=label.attributes(),
            evaluation_id=label.id,
            time_ns=label.time_ns,
        )

    def attributes(self) -> dict[str, Value]:
        """The record's attributes: those of the fields that are set, and an evaluation id."""
        pairs: dict[str, Value | None] = {
            **self.more,
            keys.EVALUATION_NAME: self.name,
            keys.EVALUATION_SCORE: self.value,
            keys.EVALUATION_SOURCE: self.source,
            keys.EVALUATION_EXPLANATION: self.explanation,
            keys.EVALUATION_ID: self.evaluation_id or uuid.uuid4().hex,
            keys.ROLLOUT_ID: self.rollout_id,
            keys.GEN_AI_RESPONSE_ID: self.response_id,
            keys.EVALUATION_OF: "call" if self.span else None,
        }
        return {key: value for key, value in pairs.items() if value is not None}


def send_scores(
    scores: Sequence[FeedbackScore],
    collector: str,
    headers: str | None,
    certificate: str | None = None,
    *,
    token_advice: str,
) -> list[str]:
    """Sends scores to the collector's OTLP/gRPC URL and returns their evaluations' ids.

    `headers` have the form of OTEL_EXPORTER_OTLP_HEADERS; `certificate` is a PEM file of trusted roots for `https://`, by
    default the system's; `token_advice` says what to do if the token is refused. Raises StoreError if any is not accepted,
    ConfigError if the certificate cannot be read.
    """
    import grpc
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
    from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs, ScopeLogs

    url = urlsplit(collector if "//" in collector else f"//{collector}")
    metadata = [tuple(map(unquote, pair.split("=", 1))) for pair in (headers or "").split(",") if "=" in pair]
    if url.scheme == "https":
        channel = grpc.secure_channel(url.netloc, grpc.ssl_channel_credentials(_read_roots(certificate)))
    else:
        channel = grpc.insecure_channel(url.netloc)
    ids = []
    with channel:
        stub: Any = LogsServiceStub(channel)  # type: ignore[no-untyped-call]
        for start in range(0, len(scores), _RECORDS_PER_REQUEST):
            records_and_ids = [_record(score) for score in scores[start : start + _RECORDS_PER_REQUEST]]
            ids += [evaluation_id for _, evaluation_id in records_and_ids]
            records = [record for record, _ in records_and_ids]
            request = ExportLogsServiceRequest(
                resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=records)])]
            )
            try:
                answer = stub.Export(
                    request, timeout=_TIMEOUT_S, metadata=[(key.strip().lower(), value) for key, value in metadata]
                )
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.Call) else None
                reason = f"{code.name}: {error.details()}" if code else str(error)
                is_denied = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                advice = token_advice if is_denied else "is it running?"
                raise StoreError(
                    f"the collector at {collector} did not accept the reward ({reason}): {advice}"
                ) from error
            if rejected := answer.partial_success.rejected_log_records:
                raise StoreError(f"the collector refused {rejected} record: {answer.partial_success.error_message}")
    return ids


def _record(feedback: FeedbackScore) -> tuple[Any, str]:
    """An OTLP log record and the id of its evaluation."""
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

    attributes = feedback.attributes()
    trace_id, span_id = feedback.span or ("", "")
    record = LogRecord(
        time_unix_nano=feedback.time_ns or time.time_ns(),
        trace_id=bytes.fromhex(trace_id),
        span_id=bytes.fromhex(span_id),
        attributes=[
            KeyValue(key=key, value=_any_value(value))
            # before 1.34, OpenTelemetry's Python package of the protocol has no field for a record's event name
            for key, value in {**attributes, "event.name": keys.EVALUATION_EVENT}.items()
        ],
    )
    return record, str(attributes[keys.EVALUATION_ID])


def _any_value(value: Value) -> Any:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue

    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(array_value=ArrayValue(values=[_any_value(item) for item in value]))


def _read_roots(certificate: str | None) -> bytes | None:
    try:
        return Path(certificate).read_bytes() if certificate else None
    except OSError as error:
        raise ConfigError(f"cannot read the collector's certificate {certificate}: {error.strerror}") from error

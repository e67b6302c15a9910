"""The three OTLP signals: their services, paths and messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from trainspan_collector.otlp.text_repair import repaired
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["LOGS", "METRICS", "SIGNALS", "TRACES", "ExportOutcome", "OtlpSignal"]


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """The outcome of an accepted request: OTLP's full or partial success."""

    n_rejected: int = 0
    message: str = ""
    """Names the rejected ones; empty if there is none."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of rejected items."""


@dataclass(frozen=True, slots=True)
class OtlpSignal:
    """One kind of telemetry that OTLP carries."""

    name: str
    """Also the last part of the HTTP path: /v1/{name}."""
    service: str
    """gRPC service; its one method is Export."""
    request: type[Message]
    response: type[Message]
    rejected_field: str
    """The partial success's count of rejected items."""

    def parse(self, body: bytes) -> Any:
        """The request in `body`; empty bytes are an empty request. Raises InvalidRecordError."""
        message = self.request()
        try:
            message.ParseFromString(body)
        except DecodeError as error:
            raise self._not_one(body, error) from error
        return message

    def parse_repaired(self, body: bytes) -> tuple[Any, bytes, int]:
        """The request in `body`, its bytes, and the number of its texts that were not valid UTF-8 (text_repair.py).

        Raises InvalidRecordError.
        """
        try:
            return self.parse(body), body, 0
        except InvalidRecordError:
            try:
                kind: Any = self.request.DESCRIPTOR  # of two classes, by protobuf's build
                valid, n_repaired = repaired(body, kind)
            except ValueError as error:
                raise self._not_one(body, error) from error
            if not n_repaired:
                raise
            return self.parse(valid), valid, n_repaired

    def _not_one(self, body: bytes, error: Exception) -> InvalidRecordError:
        return InvalidRecordError(
            f"the body of {len(body)} bytes is not an {self.request.__name__} in protobuf: {error}"
        )

    def answer(self, outcome: ExportOutcome) -> Message:
        """The response; an empty message if everything was accepted."""
        response: Any = self.response()
        if outcome.n_rejected:
            partial = response.partial_success
            setattr(partial, self.rejected_field, outcome.n_rejected)
            partial.error_message = outcome.message
        return response


def _signal(name: str, service: str, request: type[Message], response: type[Message], rejected: str) -> OtlpSignal:
    return OtlpSignal(name, f"opentelemetry.proto.collector.{service}", request, response, rejected)


TRACES: Final = _signal(
    "traces", "trace.v1.TraceService", ExportTraceServiceRequest, ExportTraceServiceResponse, "rejected_spans"
)
LOGS: Final = _signal(
    "logs", "logs.v1.LogsService", ExportLogsServiceRequest, ExportLogsServiceResponse, "rejected_log_records"
)
METRICS: Final = _signal(
    "metrics",
    "metrics.v1.MetricsService",
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
    "rejected_data_points",
)
SIGNALS: Final = (TRACES, LOGS, METRICS)

"""The OTLP/gRPC receiver: Export of traces, logs and metrics, answered once the bytes are on disk.

Handlers take raw bytes and parse them here: stock generated stubs answer INTERNAL for a body that they cannot decode,
which tells an exporter to give up for the wrong reason. Spec: https://opentelemetry.io/docs/specs/otlp/#otlpgrpc.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from trainspan_collector.frames import Signal
from trainspan_collector.intake import Intake, OverloadError
from trainspan_collector.otlp import parse_logs, parse_metrics, parse_traces, rejected_spans
from trainspan_schemas.errors import InvalidRecordError, StoreError

__all__ = ["Receiver"]

log = logging.getLogger(__name__)

_WORKERS = 64  # each waiting acknowledgement holds one
_FULL_SUCCESS = b""
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)
_SERVICES = {
    "opentelemetry.proto.collector.trace.v1.TraceService",
    "opentelemetry.proto.collector.logs.v1.LogsService",
    "opentelemetry.proto.collector.metrics.v1.MetricsService",
}


class Receiver:
    """Binds `address` at once, serves from `start` on. Raises RuntimeError where the port is taken."""

    def __init__(self, address: str, intake: Intake, *, max_request_bytes: int) -> None:
        self._intake = intake
        self._max_request_bytes = max_request_bytes
        self._counts_lock = threading.Lock()
        self.n_metrics_requests = 0
        self._server = grpc.server(
            ThreadPoolExecutor(_WORKERS, thread_name_prefix="otlp"),
            options=[
                ("grpc.max_receive_message_length", max_request_bytes),  # of both forms, compressed and not
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        trace, logs, metrics = (f"opentelemetry.proto.collector.{name}" for name in ("trace", "logs", "metrics"))
        self._serve(f"{trace}.v1.TraceService", "Export", self._export_traces)
        self._serve(f"{logs}.v1.LogsService", "Export", self._export_logs)
        self._serve(f"{metrics}.v1.MetricsService", "Export", self._export_metrics)
        self._serve("grpc.health.v1.Health", "Check", _check_health)
        self.port = self._server.add_insecure_port(address)

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Refuses new requests and lets those under way finish within `grace_s`."""
        self._server.stop(grace_s).wait()

    def _serve(self, service: str, method: str, handler: Callable[[bytes, grpc.ServicerContext], bytes]) -> None:
        handlers = {method: grpc.unary_unary_rpc_method_handler(handler)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def _export_traces(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            rejection = rejected_spans(parse_traces(body))
        except InvalidRecordError as error:
            _refuse(context, str(error))
        if rejection.n_total > rejection.n_rejected:
            self._keep(Signal.TRACES, body, context)
        if not rejection.n_rejected:
            return _FULL_SUCCESS
        log.warning("partial success %s", rejection.message)
        partial = ExportTracePartialSuccess(rejected_spans=rejection.n_rejected, error_message=rejection.message)
        answer: bytes = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
        return answer

    def _export_logs(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            request = parse_logs(body)
        except InvalidRecordError as error:
            _refuse(context, str(error))
        if request.resource_logs:
            self._keep(Signal.LOGS, body, context)
        return _FULL_SUCCESS

    def _export_metrics(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            parse_metrics(body)
        except InvalidRecordError as error:
            _refuse(context, str(error))
        with self._counts_lock:
            self.n_metrics_requests += 1
        return _FULL_SUCCESS

    def _keep(self, signal: Signal, body: bytes, context: grpc.ServicerContext) -> None:
        try:
            self._intake.keep(signal, body)
        except OverloadError as error:
            _try_later(context, str(error), error.retry_after_s)
        except StoreError as error:
            _try_later(context, str(error), 1.0)


def _refuse(context: grpc.ServicerContext, message: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
    raise AssertionError


def _try_later(context: grpc.ServicerContext, message: str, after_s: float) -> NoReturn:
    """UNAVAILABLE with RetryInfo in both places where exporters look for it."""
    log.warning("refused retry_after_s=%.1f reason=%s", after_s, message)
    retry = RetryInfo(retry_delay=Duration(seconds=ceil(after_s)))
    detail = AnyMessage()
    detail.Pack(retry)
    status = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message=message, details=[detail])
    context.set_trailing_metadata(
        (
            ("google.rpc.retryinfo-bin", retry.SerializeToString()),
            ("grpc-status-details-bin", status.SerializeToString()),
        )
    )
    context.abort(grpc.StatusCode.UNAVAILABLE, message)
    raise AssertionError


def _check_health(body: bytes, context: grpc.ServicerContext) -> bytes:
    """grpc.health.v1 Check: the request is one string field, the service's name."""
    service = body[2:].decode(errors="replace")
    if service and service not in _SERVICES:
        context.abort(grpc.StatusCode.NOT_FOUND, f"no service {service!r}")
    return _SERVING

"""The OTLP/gRPC receiver: Export of traces, logs and metrics, answered once the bytes are on disk; and grpc.health.v1.

Handlers take raw bytes and parse them here: stock generated stubs answer INTERNAL for a body that they cannot decode,
which tells an exporter to give up for the wrong reason. They take a stream of which they read one message, so that a token
is checked before a message is read, and that a message which does not come whole is seen here.
Spec: https://opentelemetry.io/docs/specs/otlp/#otlpgrpc.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from trainspan_collector.access import Access, DeniedError, Right, bearer_of
from trainspan_collector.exports import Exports
from trainspan_collector.intake import OverloadError
from trainspan_collector.listeners import Tls
from trainspan_collector.metrics import Metrics, Refusal
from trainspan_collector.patience import Patience
from trainspan_collector.signals import SIGNALS, OtlpSignal
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["Receiver"]

_WORKERS = 64  # each waiting acknowledgement holds one
_MAX_CONNECTIONS = 1000
_MESSAGE_S = 60.0
_END_S = 0.2
_GIVES_UP_S = 1.0
"""A call that ends so near to its sender's deadline was ended by the sender; gRPC refuses a large message as it begins."""
_TRANSPORT = "grpc"


class Receiver:
    """Binds `address` at once, serves from `start` on. Raises RuntimeError where the port is taken."""

    def __init__(
        self,
        address: str,
        exports: Exports,
        *,
        access: Access,
        metrics: Metrics,
        tls: Tls | None,
        max_request_bytes: int,
    ) -> None:
        self._exports = exports
        self._access = access
        self._metrics = metrics
        self._patience = Patience(_MESSAGE_S)
        self._server = grpc.server(
            ThreadPoolExecutor(_WORKERS, thread_name_prefix="otlp"),
            interceptors=[_TokenGuard(access, metrics)],
            options=[
                ("grpc.max_receive_message_length", max_request_bytes),  # of both forms, compressed and not
                ("grpc.so_reuseport", 0),
                ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        for signal in SIGNALS:
            export = grpc.stream_unary_rpc_method_handler(functools.partial(self._export, signal))
            handler = grpc.method_handlers_generic_handler(signal.service, {"Export": export})
            self._server.add_generic_rpc_handlers((handler,))
        self._health = HealthServicer()
        add_HealthServicer_to_server(self._health, self._server)
        self.say_ready(False)
        if tls is None:
            self.port = self._server.add_insecure_port(address)
        else:
            credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)])
            self.port = self._server.add_secure_port(address, credentials)

    def start(self) -> None:
        self._server.start()

    def say_ready(self, ready: bool) -> None:
        """What the health service answers, for the process and for each OTLP service."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *(signal.service for signal in SIGNALS)):
            self._health.set(service, status)

    def stop(self, grace_s: float) -> None:
        """Refuses new requests and lets those under way finish within `grace_s`."""
        self._server.stop(grace_s).wait()
        self._patience.close()

    def _export(self, signal: OtlpSignal, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        # Whom _TokenGuard has let in.
        role = self._access.authorize(Right.WRITE, bearer_of(context.invocation_metadata()))
        body = self._read(messages, context)
        try:
            outcome = self._exports.take(signal, body, role, _TRANSPORT)
        except InvalidRecordError as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OverloadError as error:
            _try_later(context, str(error), error.retry_after_s)
        answer: bytes = signal.answer(outcome).SerializeToString()
        return answer

    def _read(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The request's one message."""
        body = None
        with self._patience.waiting(context) as wait, contextlib.suppress(grpc.RpcError):
            body = next(messages, None)
        if body is None:
            self._end_without_message(context, was_slow=wait.is_over)
        return body

    def _end_without_message(self, context: grpc.ServicerContext, *, was_slow: bool) -> NoReturn:
        """Where a message was too large, gRPC has answered already: here that is counted."""
        if not _has_ended(context):
            self._metrics.refused(_TRANSPORT, Refusal.INVALID)
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the request has no message")
        remaining_s = context.time_remaining()
        if was_slow:
            self._metrics.refused(_TRANSPORT, Refusal.TOO_SLOW)
        elif remaining_s is None or remaining_s > _GIVES_UP_S:
            self._metrics.refused(_TRANSPORT, Refusal.TOO_LARGE)
        _abort(context, grpc.StatusCode.CANCELLED, "the message did not come")


class _TokenGuard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Asks every call for a token whose role may make it, before any message is read."""

    def __init__(self, access: Access, metrics: Metrics) -> None:
        self._access = access
        self._metrics = metrics

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        of_health = handler_call_details.method.startswith(f"/{HEALTH_SERVICE}/")
        try:
            self._access.authorize(
                Right.HEALTH if of_health else Right.WRITE, bearer_of(handler_call_details.invocation_metadata)
            )
        except DeniedError as error:
            self._metrics.refused(_TRANSPORT, Refusal.FORBIDDEN if error.is_known else Refusal.UNAUTHENTICATED)
            code = grpc.StatusCode.PERMISSION_DENIED if error.is_known else grpc.StatusCode.UNAUTHENTICATED
            message = str(error)
            return grpc.stream_unary_rpc_method_handler(lambda _, context: _abort(context, code, message))
        handler = continuation(handler_call_details)
        if handler is None:
            self._metrics.refused(_TRANSPORT, Refusal.NOT_FOUND)
        return handler


def _has_ended(context: grpc.ServicerContext) -> bool:
    """Whether the call is over, or is so in a moment."""
    ended = threading.Event()
    return not context.add_callback(ended.set) or ended.wait(_END_S)


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(code, message)
    raise AssertionError


def _try_later(context: grpc.ServicerContext, message: str, after_s: float) -> NoReturn:
    """UNAVAILABLE with RetryInfo in both places where exporters look for it."""
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
    _abort(context, grpc.StatusCode.UNAVAILABLE, message)

"""The OTLP/gRPC receiver: Export of traces, logs and metrics, answered once the bytes are on disk; and grpc.health.v1.

Handlers take raw bytes and parse them here: the standard generated stubs answer INTERNAL for a body that they cannot decode,
which makes an exporter give up for the wrong reason. They take a stream but read one message, so that the token is checked
before a message is read, and incomplete messages are noticed here.
Spec: https://opentelemetry.io/docs/specs/otlp/#otlpgrpc.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import HealthServicer

from trainspan_collector.network.access import DeniedError, Right, Role
from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.grpc_limits import CallGuard, RoleHandlers, abort, server_options
from trainspan_collector.network.grpc_timeout import MessageTimeout
from trainspan_collector.otlp.gunzip import TooLargeError
from trainspan_collector.otlp.signals import SIGNALS, OtlpSignal
from trainspan_collector.receive.admission import OverloadError
from trainspan_collector.receive.export_handler import ExportHandler
from trainspan_collector.runtime.metrics import Metrics, RefusalReason
from trainspan_schemas.errors import InvalidRecordError

__all__ = ["GrpcServer"]

_WORKERS: Final = {Role.AGENT: 64, Role.SERVING: 32, Role.RUNNER: 32, Role.USER: 32}
"""Each pending acknowledgement holds one. Roles share none, so that no role waits for another's senders."""
_EXPORTS: Final = {f"/{signal.service}/Export": signal for signal in SIGNALS}
_HEALTH_WORKERS: Final = 16
_HEALTH_S: Final = 2.0
_MESSAGE_S = 60.0
_END_S = 0.2
_GIVES_UP_S = 1.0
"""A call that ends this close to its sender's deadline was ended by the sender; gRPC refuses a large message at its start."""
_TRANSPORT = "grpc"


class GrpcServer:
    """Binds `address` at once, serves after `start`. Raises RuntimeError if the port is in use."""

    def __init__(
        self, address: str, exports: ExportHandler, *, guard: AccessControl, metrics: Metrics, max_request_bytes: int
    ) -> None:
        self._exports = exports
        self._metrics = metrics
        self._timeouts = {
            role: MessageTimeout(_MESSAGE_S, crowd=n_workers // 2) for role, n_workers in _WORKERS.items()
        }
        self._health_timeout = MessageTimeout(_HEALTH_S)
        self._health = HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(_HEALTH_WORKERS, thread_name_prefix="health"),
            handlers=[
                RoleHandlers(guard.access, Right.WRITE, _WORKERS, self._exports_by_method(), name="otlp"),
                self._health_handlers(),
            ],
            interceptors=[
                CallGuard(
                    guard.access,
                    lambda method: None if method.startswith(f"/{HEALTH_SERVICE}/") else Right.WRITE,
                    transport=_TRANSPORT,
                    on_denied=lambda error: metrics.refused(_TRANSPORT, refusal_of(error)),
                    on_unknown=lambda: metrics.refused(_TRANSPORT, RefusalReason.NOT_FOUND),
                )
            ],
            options=server_options(max_request_bytes),
        )
        self.say_ready(False)
        self.port: int = guard.add_port(self._server, address)

    def start(self) -> None:
        self._server.start()

    def say_ready(self, ready: bool) -> None:
        """Sets the health service's answer, for the process and for each OTLP service."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *(signal.service for signal in SIGNALS)):
            self._health.set(service, status)

    def stop(self, grace_s: float) -> None:
        """Refuses new requests and gives running ones `grace_s` to finish."""
        self._server.stop(grace_s).wait()
        for timeout in (*self._timeouts.values(), self._health_timeout):
            timeout.close()

    def _exports_by_method(self) -> dict[str, Callable[[Role, Any, Any], bytes]]:
        return {method: functools.partial(self._export, signal) for method, signal in _EXPORTS.items()}

    def _export(
        self, signal: OtlpSignal, role: Role, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> bytes:
        body = self._read(role, messages, context)
        try:
            outcome = self._exports.handle(signal, body, role, _TRANSPORT)
        except InvalidRecordError as error:
            abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TooLargeError as error:
            abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except OverloadError as error:
            _try_later(context, str(error), error.retry_after_s)
        answer: bytes = signal.answer(outcome).SerializeToString()
        return answer

    def _read(self, role: Role, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The request's one message."""
        body = None
        with self._timeouts[role].waiting(context) as wait, contextlib.suppress(grpc.RpcError):
            body = next(messages, None)
        if body is None:
            self._end_without_message(context, was_slow=wait.is_over)
        return body

    def _health_handlers(self) -> Any:
        """Check and Watch, in separate workers, none of which waits long for a message."""

        def read(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._health_timeout.waiting(context):
                return health_pb2.HealthCheckRequest.FromString(next(messages, b""))

        def check(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            return self._health.Check(read(messages, context), context)

        def watch(messages: Iterator[bytes], context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
            self._health.Watch(read(messages, context), context, send)

        watch.experimental_non_blocking = True  # type: ignore[attr-defined]
        encode = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.stream_unary_rpc_method_handler(check, response_serializer=encode),
                "Watch": grpc.stream_stream_rpc_method_handler(watch, response_serializer=encode),
            },
        )

    def _end_without_message(self, context: grpc.ServicerContext, *, was_slow: bool) -> NoReturn:
        """Ends the call. If the message was too large, gRPC has already answered, and it is only counted here."""
        if not _has_ended(context):
            self._metrics.refused(_TRANSPORT, RefusalReason.INVALID)
            abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the request has no message")
        remaining_s = context.time_remaining()
        if was_slow:
            self._metrics.refused(_TRANSPORT, RefusalReason.TOO_SLOW)
        elif remaining_s is None or remaining_s > _GIVES_UP_S:
            self._metrics.refused(_TRANSPORT, RefusalReason.TOO_LARGE)
        abort(context, grpc.StatusCode.CANCELLED, "the message did not arrive")


def _has_ended(context: grpc.ServicerContext) -> bool:
    """Whether the call has ended, or does so within a moment."""
    ended = threading.Event()
    return not context.add_callback(ended.set) or ended.wait(_END_S)


def refusal_of(error: DeniedError) -> RefusalReason:
    return RefusalReason.FORBIDDEN if error.is_known else RefusalReason.UNAUTHENTICATED


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
    abort(context, grpc.StatusCode.UNAVAILABLE, message)

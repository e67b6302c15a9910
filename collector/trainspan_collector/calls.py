"""What all gRPC listeners share: limits on connections and messages, and the token, asked for before a message is read."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

import grpc

from trainspan_collector.access import Access, DeniedError, Right, bearer_of

__all__ = ["CallGuard", "abort", "server_options"]

_MAX_CONNECTIONS: Final = 1000
_MAX_CALLS: Final = 128
_HANDSHAKE_MS: Final = 20_000
_IDLE_MS: Final = 600_000
_DENYING_WORKERS: Final = 4


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """For `grpc.server`. Messages have that many bytes at most, compressed and not."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", _MAX_CALLS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class CallGuard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Asks every call for a token whose role may make it."""

    def __init__(
        self,
        access: Access,
        right_of: Callable[[str], Right | None],
        *,
        on_denied: Callable[[DeniedError], None] = lambda _: None,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        """`right_of` says what a method needs; None: no token. `on_unknown`: there is no such method."""
        self._access = access
        self._right_of = right_of
        self._on_denied = on_denied
        self._on_unknown = on_unknown
        self._pool = ThreadPoolExecutor(_DENYING_WORKERS, thread_name_prefix="denying")

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        right = self._right_of(handler_call_details.method)
        try:
            if right is not None:
                self._access.authorize(right, bearer_of(handler_call_details.invocation_metadata))
        except DeniedError as error:
            self._on_denied(error)
            return self._denial(error)
        handler = continuation(handler_call_details)
        if handler is None:
            self._on_unknown()
        return handler

    def _denial(self, error: DeniedError) -> Any:
        """A handler that reads nothing. In threads of its own, it waits for no other call."""
        code = grpc.StatusCode.PERMISSION_DENIED if error.is_known else grpc.StatusCode.UNAUTHENTICATED
        message = str(error)

        def deny(_: object, context: grpc.ServicerContext) -> None:
            abort(context, code, message)

        deny.experimental_thread_pool = self._pool  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(deny)


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(code, message)
    raise AssertionError

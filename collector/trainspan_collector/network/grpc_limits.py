"""Shared by all gRPC listeners: limits on connections and messages, and a token check before a message is read."""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn

import grpc

from trainspan_collector.network.access import Access, DeniedError, Right, Role, bearer_of

__all__ = ["CallGuard", "RoleHandlers", "abort", "server_options"]

_MAX_CONNECTIONS: Final = 1000
_MAX_CALLS: Final = 128
_HANDSHAKE_MS: Final = 20_000
_IDLE_MS: Final = 600_000
_DENYING_WORKERS: Final = 4


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options for `grpc.server`. Messages have at most `max_message_bytes`, compressed and uncompressed."""
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
    """Requires a token for every call, of a role that may make it."""

    def __init__(
        self,
        access: Access,
        right_of: Callable[[str], Right | None],
        *,
        transport: str,
        on_denied: Callable[[DeniedError], None] = lambda _: None,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        """`right_of` returns what a method needs; None: no token. `on_unknown` is called for an unknown method."""
        self._access = access
        self._transport = transport
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
            self._access.denials.note(self._transport, error)
            self._on_denied(error)
            return self._denial(error)
        handler = continuation(handler_call_details)
        if handler is None:
            self._on_unknown()
        return handler

    def _denial(self, error: DeniedError) -> Any:
        """A handler that reads nothing. It has its own threads, so it waits for no other call."""
        code = grpc.StatusCode.PERMISSION_DENIED if error.is_known else grpc.StatusCode.UNAUTHENTICATED
        message = str(error)

        def deny(_: object, context: grpc.ServicerContext) -> None:
            abort(context, code, message)

        deny.experimental_thread_pool = self._pool  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(deny)


class RoleHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Methods with separate workers for each role, so that no role waits for another's calls."""

    def __init__(
        self,
        access: Access,
        right: Right,
        workers: Mapping[Role, int],
        behaviors: Mapping[str, Callable[[Role, Any, Any], Any]],
        *,
        name: str,
        make: Callable[[Any], Any] = grpc.stream_unary_rpc_method_handler,
    ) -> None:
        """`behaviors` maps methods to functions of role, messages and context."""
        self._access = access
        self._right = right
        self._methods = frozenset(behaviors)
        self._handlers = {}
        for role, n_workers in workers.items():
            pool = ThreadPoolExecutor(n_workers, thread_name_prefix=f"{name}-{role}")
            for method, behavior in behaviors.items():
                of_role: Any = functools.partial(behavior, role)
                of_role.experimental_thread_pool = pool
                self._handlers[method, role] = make(of_role)

    def service(self, handler_call_details: Any) -> Any:
        """Only for calls that CallGuard has admitted."""
        if handler_call_details.method not in self._methods:
            return None
        role = self._access.authorize(self._right, bearer_of(handler_call_details.invocation_metadata))
        return self._handlers[handler_call_details.method, role]


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(code, message)
    raise AssertionError

"""The HTTP listener: an ASGI server (uvicorn) in a separate thread.

It bounds what uvicorn does not: the number of connections, and the time that one may take to send a request's headers.
Clients of gRPC are passed on to the gRPC server, whose port it may serve too.
"""

import asyncio
import functools
import logging
import socket
import threading
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.grpc_relay import PREFACE, relay
from trainspan_collector.receive.http_app import HttpApp

__all__ = ["HttpServer", "listen"]

_BACKLOG: Final = 1024
_MAX_CONNECTIONS: Final = 1000
_HEADERS_S: Final = 20.0


class HttpServer:
    """Binds `address` at once, serves after `start`. Raises OSError if nothing can listen there."""

    def __init__(self, address: str, web: HttpApp, *, guard: AccessControl, grpc_port: int | None = None) -> None:
        """`grpc_port` is the local port of the gRPC server to which clients of gRPC are passed on; None: they are refused."""
        tls = guard.tls
        self._web = web
        self._sockets = [listen(address)]
        self.port: int = self._sockets[0].getsockname()[1]
        config = uvicorn.Config(
            web,
            http=functools.partial(_Connection, grpc_port=grpc_port),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=tls.certificate_file if tls else None,
            ssl_keyfile=tls.key_file if tls else None,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it would log its own start and stop
        config.load()
        if config.ssl is not None:
            guard.follow(config.ssl)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def share(self, listener: socket.socket) -> None:
        """Serves the connections of `listener` too, and closes it in the end. Before `start`."""
        self._sockets.append(listener)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Gives running requests `grace_s` to finish, then ends."""
        self._server.config.timeout_graceful_shutdown = max(1, int(grace_s))
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        for listener in self._sockets:
            listener.close()
        self._web.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=self._sockets))


class _Connection(H11Protocol):  # h11 bounds the size of headers, which httptools does not
    """One client's connection. Closed at once if there are too many, and later if no request begins in time."""

    _unbegun: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, grpc_port: int | None, **named: Any) -> None:
        super().__init__(*given, **named)
        self._grpc_port = grpc_port
        """None: this is no client of gRPC."""
        self._first = b""
        self._relay: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        else:
            self._await_request()

    def data_received(self, data: bytes) -> None:
        if self._grpc_port is None:
            super().data_received(data)
            return
        self._first += data
        if self._first.startswith(PREFACE):
            self._stop_waiting()
            self.connections.discard(self)
            self.transport.pause_reading()  # until the relay reads
            self._relay = self.loop.create_task(relay(self.transport, self._first, self._grpc_port))
        elif not PREFACE.startswith(self._first):
            self._grpc_port = None
            super().data_received(self._first)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering():  # else the next request has already arrived
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._stop_waiting()
        self._unbegun = self.loop.call_later(_HEADERS_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._unbegun is not None:
            self._unbegun.cancel()


def listen(address: str) -> socket.socket:
    """A socket that listens at HOST:PORT. Raises OSError."""
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, at = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(at)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener

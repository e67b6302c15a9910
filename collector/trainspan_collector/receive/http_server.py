"""The HTTP listener: an ASGI server (uvicorn) in a separate thread.

Clients of gRPC are passed on to the gRPC server, whose port it may serve too.
"""

import asyncio
import functools
import logging
import socket
import threading
from typing import Any, Final

import uvicorn

from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.network.grpc_relay import PREFACE, relay
from trainspan_collector.receive.http_app import HttpApp
from trainspan_schemas.http_connection import BoundedConnection

__all__ = ["HttpServer", "listen"]

_BACKLOG: Final = 1024


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


class _Connection(BoundedConnection):
    most = 1000

    def __init__(self, *args: Any, grpc_port: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grpc_port = grpc_port
        """None: this is no client of gRPC."""
        self._first = b""
        self._relay: asyncio.Task[None] | None = None

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

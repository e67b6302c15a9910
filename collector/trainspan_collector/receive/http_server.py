"""The HTTP listener: an ASGI server (uvicorn) in a separate thread.

It bounds what uvicorn does not: the number of connections, and the time that one may take to send a request's headers.
"""

import asyncio
import logging
import socket
import threading
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainspan_collector.network.credentials import AccessControl
from trainspan_collector.receive.http_app import HttpApp

__all__ = ["HttpServer"]

_BACKLOG: Final = 1024
_MAX_CONNECTIONS: Final = 1000
_HEADERS_S: Final = 20.0


class HttpServer:
    """Binds `address` at once, serves after `start`. Raises OSError if nothing can listen there."""

    def __init__(self, address: str, web: HttpApp, *, guard: AccessControl) -> None:
        tls = guard.tls
        host, _, port = address.rpartition(":")
        self._web = web
        self._socket = _listen(host.strip("[]"), int(port))
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            web,
            http=_Connection,
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

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Gives running requests `grace_s` to finish, then ends."""
        self._server.config.timeout_graceful_shutdown = max(1, int(grace_s))
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        self._web.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


class _Connection(H11Protocol):  # h11 bounds the size of headers, which httptools does not
    """One client's connection. Closed at once if there are too many, and later if no request begins in time."""

    _unbegun: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        else:
            self._await_request()

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


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener

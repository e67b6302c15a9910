"""The HTTP listener: an ASGI server (uvicorn) in a thread of its own."""

import asyncio
import logging
import socket
import threading

import uvicorn

from trainspan_collector.listeners import Tls
from trainspan_collector.web import Web

__all__ = ["HttpServer"]

_BACKLOG = 1024
_MAX_CONNECTIONS = 1000


class HttpServer:
    """Binds `address` at once, serves from `start` on. Raises OSError where nothing can listen there."""

    def __init__(self, address: str, web: Web, *, tls: Tls | None) -> None:
        host, _, port = address.rpartition(":")
        self._web = web
        self._socket = _listen(host.strip("[]"), int(port))
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            web,
            http="h11",  # it bounds headers, which httptools does not
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            ssl_certfile=tls.certificate_file if tls else None,
            ssl_keyfile=tls.key_file if tls else None,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it would tell of its own start and stop
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Lets requests under way finish within `grace_s`, then ends."""
        self._server.config.timeout_graceful_shutdown = max(1, int(grace_s))
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        self._web.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


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

"""The tokens and certificate that protect every listener, reloaded while they serve."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from trainspan_collector.network.access import Access
from trainspan_collector.network.ports import Tls
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.roles import Role

__all__ = ["AccessControl"]

log = logging.getLogger(__name__)


class AccessControl:
    """Access control and encryption of connections. `reload` is for one thread, the rest is thread-safe."""

    def __init__(self, access: Access, tls: Tls | None, own_token: str, token_file: Path | None = None) -> None:
        """`own_token` is for the same user's commands, which find it in the store's address file."""
        self.access = access
        self.tls = tls
        self.own_token = own_token
        self.token_file = token_file
        self._served = tls

    def add_port(self, server: grpc.Server, address: str) -> int:
        """Adds a port to `server` and returns its number. Raises RuntimeError if it is in use."""
        if self.tls is None:
            return int(server.add_insecure_port(address))
        newer: Any = self._newer_configuration()  # None for "unchanged", which the stubs do not know
        credentials = grpc.dynamic_ssl_server_credentials(_configuration(self.tls), newer)
        return int(server.add_secure_port(address, credentials))

    def follow(self, context: ssl.SSLContext) -> None:
        """From now on, each handshake of `context` uses what was loaded last; `context` itself stays unchanged."""

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str, _context: ssl.SSLContext) -> None:
            if self.tls is not None and self.tls is not self._served:
                connection.context = self.tls.context

        context.sni_callback = choose  # called at every handshake, even if the client names no server

    def reload(self) -> None:
        """Reloads tokens and certificate; open connections continue. Invalid files change nothing."""
        try:
            access = Access.from_file(self.token_file) if self.token_file else None
            tls = Tls.load(str(self.tls.certificate_file), str(self.tls.key_file)) if self.tls else None
        except ConfigError as error:
            log.error("cannot reload, the previous tokens and certificates stay in use: %s", error)
            return
        if access is not None:
            self.access.replace_by(access.with_token(self.own_token, Role.RUNNER))
        if tls is not None:
            self.tls = tls
        log.warning("tokens and certificates reloaded")

    def _newer_configuration(self) -> Callable[[], "grpc.ServerCertificateConfiguration | None"]:
        """Called at each handshake of one server: returns the certificate if it has changed since the last time."""
        served = self.tls

        def configuration() -> "grpc.ServerCertificateConfiguration | None":
            nonlocal served
            if self.tls is served or self.tls is None:
                return None
            served = self.tls
            return _configuration(self.tls)

        return configuration


def _configuration(tls: Tls) -> "grpc.ServerCertificateConfiguration":
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)])

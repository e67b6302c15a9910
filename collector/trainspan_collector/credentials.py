"""What protects every listener, and how it is read anew while they serve."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from trainspan_collector.access import Access, Role
from trainspan_collector.listeners import Tls
from trainspan_schemas.errors import ConfigError

__all__ = ["Guard"]

log = logging.getLogger(__name__)


class Guard:
    """Who may do what, and how connections are encrypted. `reload` is for one thread, the rest thread-safe."""

    def __init__(self, access: Access, tls: Tls | None, own_token: str | None = None) -> None:
        """`own_token` is for commands of the same user, in the store's address file."""
        self.access = access
        self.tls = tls
        self.own_token = own_token
        self._contexts: list[ssl.SSLContext] = []

    def add_port(self, server: grpc.Server, address: str) -> int:
        """The port that `server` got. Raises RuntimeError where it is taken."""
        if self.tls is None:
            return int(server.add_insecure_port(address))
        newer: Any = self._newer_configuration()  # None for "as before", which the stubs do not know
        credentials = grpc.dynamic_ssl_server_credentials(_configuration(self.tls), newer)
        return int(server.add_secure_port(address, credentials))

    def follow(self, context: ssl.SSLContext) -> None:
        """From now on `context` gets what is read anew."""
        self._contexts.append(context)

    def reload(self, token_file: str | None) -> None:
        """Reads tokens and certificate again; connections that are open go on. Files that are wrong change nothing."""
        try:
            access = Access.from_file(Path(token_file)) if token_file else None
            tls = Tls.load(str(self.tls.certificate_file), str(self.tls.key_file)) if self.tls else None
        except ConfigError as error:
            log.error("not read anew, the tokens and certificates of before stay in use: %s", error)
            return
        if access is not None:
            self.access.replace_by(access if self.own_token is None else access.with_token(self.own_token, Role.RUNNER))
        if tls is not None:
            self.tls = tls
            for context in self._contexts:
                context.load_cert_chain(tls.certificate_file, tls.key_file)
        log.warning("tokens and certificates read anew")

    def _newer_configuration(self) -> Callable[[], "grpc.ServerCertificateConfiguration | None"]:
        """Asked at each handshake of one server: the certificate where it is another one than the last time."""
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

"""The address and credentials for reading the store: a Flight location, a bearer token, trusted certificates.

Flight and OTLP need the same credentials, so a reader of a remote store takes them from the variables that OTLP exporters
read: `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_EXPORTER_OTLP_CERTIFICATE`. On this machine the state folder has a token.
"""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.store.roles import Role, home_token_file, token_of

__all__ = ["StoreEndpoint", "headers_of", "is_loopback", "is_this_machine"]

PING_EVERY_S = 60.0
"""A connection that is silent for so long is probed. The collector allows a ping every 10 s; a server with gRPC's defaults would
hang up at more than one in 300 s without data (gRFC A8), as during a slow query."""
PING_ANSWER_S = 20.0

_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
_CERTIFICATE = "OTEL_EXPORTER_OTLP_CERTIFICATE"


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """A collector's Flight listener, with all that a connection needs."""

    location: str
    """`grpc://HOST:PORT`, or `grpc+tls://HOST:PORT`."""
    authorization: str | None = None
    """`Bearer TOKEN`, if the collector requires one."""
    root_certificates: bytes | None = None
    """PEM; None: the system's certificates."""
    verify: bool = True
    """False for a collector of this user on this machine: its address file identifies it."""

    @classmethod
    def of_address(cls, location: str, environ: Mapping[str, str]) -> "StoreEndpoint":
        """The endpoint at an address. Raises ConfigError if the certificate or the token file cannot be read."""
        certificate = environ.get(_CERTIFICATE)
        try:
            roots = Path(certificate).read_bytes() if certificate else None
        except OSError as error:
            raise ConfigError(f"{_CERTIFICATE} {certificate}: {error.strerror}") from error
        authorization = headers_of(environ.get(_HEADERS, "")).get("authorization")
        if authorization is None and is_this_machine(location) and home_token_file().exists():
            authorization = f"Bearer {token_of(home_token_file(), Role.RUNNER)}"
        return cls(location, authorization, roots)

    @property
    def connect_options(self) -> dict[str, Any]:
        """Options for `flight.connect(location, **options)`; a connection ends if its other end is gone."""
        options: dict[str, Any] = {
            "generic_options": [
                ("grpc.keepalive_time_ms", round(PING_EVERY_S * 1000)),
                ("grpc.http2.ping_timeout_ms", round(PING_ANSWER_S * 1000)),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        }
        if not self.location.startswith("grpc+tls://"):
            return options
        if not self.verify:
            return options | {"disable_server_verification": True}
        return options | ({"tls_root_certs": self.root_certificates} if self.root_certificates else {})

    @property
    def call_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers for `flight.FlightCallOptions(headers=…)`."""
        return [(b"authorization", self.authorization.encode())] if self.authorization else []


def headers_of(text: str) -> dict[str, str]:
    """Parses `k=v,k=v` with percent-encoded values, as in OTEL_EXPORTER_OTLP_HEADERS; names become lower case."""
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {name.strip().lower(): unquote(value.strip()) for name, _, value in pairs}


def is_this_machine(url: str) -> bool:
    """Whether the host of a URL or HOST:PORT is a loopback address, as of `is_loopback`, or this machine's name."""
    return is_loopback(url) or _host_of(url) == socket.gethostname().lower()


def is_loopback(url: str) -> bool:
    """Whether every machine takes the host of a URL or HOST:PORT for itself: loopback, or 0.0.0.0 or ::."""
    host = _host_of(url)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _host_of(url: str) -> str:
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""

"""Listen addresses: parsed, kept on this machine unless asked otherwise, and errors of binding put into words."""

import errno
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa

from trainspan_collector.ownership import port_holder
from trainspan_schemas.errors import ConfigError, StoreError

__all__ = ["Address", "bind"]

_Server = TypeVar("_Server")


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT of one listener; port 0 is any free one."""

    option: str
    """The command's flag, for messages."""
    host: str
    port: int

    @classmethod
    def parse(cls, option: str, text: str, *, allow_remote: bool) -> "Address":
        """Raises ConfigError where `text` is no address, or one that others can reach and `allow_remote` is not set."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{option} {text!r} is not HOST:PORT, e.g. 127.0.0.1:4317")
        if not allow_remote and not _is_loopback(host):
            raise ConfigError(
                f"{option} {text} could be reached from other machines, and there is no access control: "
                "use 127.0.0.1, or add --insecure-allow-remote"
            )
        return cls(option, host, int(port))

    def bound_to(self, text: str | None) -> "Address":
        """The same listener on the port that it got: `text` is its HOST:PORT."""
        return self if text is None else replace(self, port=int(text.rpartition(":")[2]))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def bind(address: Address, make: Callable[[str], _Server]) -> _Server:
    """`make(HOST:PORT)`. Raises StoreError where nothing can listen there, naming the holder of a taken port."""
    _probe(address)
    try:
        return make(str(address))
    except (RuntimeError, pa.ArrowException) as error:
        raise StoreError(f"cannot listen on {address.option} {address}: {error}") from error


def _probe(address: Address) -> None:
    """Binds and lets go: the servers' own failure to bind writes lines of theirs to stderr."""
    try:
        candidates = socket.getaddrinfo(address.host.strip("[]"), address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, sockaddr = candidates[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(sockaddr)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StoreError(
                f"{address.option} {address} is in use by {port_holder(address.port)}: "
                f"stop it, or listen elsewhere with {address.option}"
            ) from error
        raise StoreError(f"cannot listen on {address.option} {address}: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

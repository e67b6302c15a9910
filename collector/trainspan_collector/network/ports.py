"""Listen addresses and TLS: parsed, limited to this machine unless protected, with readable errors if binding fails."""

import ipaddress
import ssl
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainspan_schemas.errors import ConfigError, StoreError
from trainspan_schemas.ports import Listener, blocked

__all__ = ["Address", "Tls", "bind", "check_free"]

_Server = TypeVar("_Server")


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT of one listener; port 0 means any free one."""

    option: str
    """The command's flag, for messages."""
    host: str
    port: int

    @classmethod
    def parse(cls, option: str, text: str, *, allow_remote: bool) -> "Address":
        """Raises ConfigError if `text` is not an address, or other machines can reach it and `allow_remote` is not set."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{option} {text!r} is not HOST:PORT, e.g. 127.0.0.1:4317")
        if not allow_remote and not _is_loopback(host):
            raise ConfigError(
                f"{option} {text} could be reached from other machines: use 127.0.0.1, or protect it with --token-file, "
                "--tls-cert and --tls-key, or add --insecure-allow-remote"
            )
        return cls(option, host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """A server's certificate chain and its key, both PEM."""

    certificate_file: Path
    key_file: Path
    certificate: bytes
    key: bytes
    context: ssl.SSLContext
    """Made from these bytes, whatever the files contain by now."""

    @classmethod
    def load(cls, certificate_file: str | None, key_file: str | None) -> "Tls | None":
        """None if neither is given. Raises ConfigError for one without the other, or files that are not such a pair."""
        if not certificate_file and not key_file:
            return None
        if not certificate_file or not key_file:
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        try:
            certificate, key = Path(certificate_file).read_bytes(), Path(key_file).read_bytes()
            context = _context(certificate, key)
        except OSError as error:  # ssl.SSLError too
            raise ConfigError(
                f"--tls-cert {certificate_file} and --tls-key {key_file} are not a PEM certificate with its key: {error}"
            ) from error
        return cls(Path(certificate_file), Path(key_file), certificate, key, context)


def _context(certificate: bytes, key: bytes) -> ssl.SSLContext:
    """A server's context with this pair. Raises ssl.SSLError if it is invalid."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="trainspan-") as folder:  # mode 0700: OpenSSL reads only files
        certificate_file, key_file = Path(folder) / "certificate", Path(folder) / "key"
        certificate_file.write_bytes(certificate)
        key_file.write_bytes(key)
        context.load_cert_chain(certificate_file, key_file, password="")
    return context


def bind(address: Address, make: Callable[[str], _Server]) -> _Server:
    """`make(HOST:PORT)`. Raises StoreError if nothing can listen there."""
    try:
        return make(str(address))
    except (RuntimeError, OSError) as error:
        raise StoreError(f"cannot listen on {address.option} {address}: {error}") from error


def check_free(addresses: Iterable[Address]) -> None:
    """Raises StoreError with all addresses at which nothing can listen, and who holds their ports."""
    if trouble := blocked(Listener(address.option, address.host, address.port) for address in addresses):
        raise StoreError(f"{trouble}: stop that, or take other ports, such as --set ports.base=0 for any free ones")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

"""TCP ports of this machine: which of those that are wanted are in use, and by whom."""

import contextlib
import errno
import os
import pwd
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Listener", "blocked", "free_port", "port_holder"]


@dataclass(frozen=True, slots=True)
class Listener:
    """An address that a process will listen on."""

    name: str
    """The option or setting that names it, for messages."""
    host: str
    port: int
    """0: any free one."""

    @classmethod
    def at(cls, name: str, address: str) -> "Listener | None":
        """That of HOST:PORT; None for `off` or a text that is no address."""
        host, _, port = address.rpartition(":")
        return cls(name, host, int(port)) if host and port.isdecimal() else None


def blocked(listeners: Iterable[Listener]) -> str | None:
    """One line that names each address at which nothing can listen now, with its holder; None if all are free."""
    troubles = [trouble for listener in listeners if (trouble := _trouble(listener))]
    return ", ".join(troubles) or None


def free_port(host: str, preferred: int = 0) -> int:
    """The preferred port if it is free, otherwise any free one. Raises OSError if nothing can listen on `host`."""
    try:
        return _bound(host, preferred)
    except OSError:
        return _bound(host, 0)


def port_holder(port: int) -> str:
    """The process that listens on a TCP port of this machine, or at least its user."""
    sockets = _listening(port)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if any(_target(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                folder = os.readlink(process / "cwd")
                return f"pid {process.name} ({(process / 'comm').read_text().strip()} in {folder})"
    for user in sockets.values():
        with contextlib.suppress(KeyError):
            return f"user {pwd.getpwuid(user).pw_name}"
    return "another process"


def _trouble(listener: Listener) -> str | None:
    where = f"{listener.name} {listener.host}:{listener.port}"
    try:
        _bound(listener.host, listener.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{where} is in use by {port_holder(listener.port)}"
        return f"{where} cannot be listened on ({error.strerror or error})"
    return None


def _bound(host: str, port: int) -> int:
    """Binds a port and releases it: servers that fail to bind write lines of their own to stderr."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _listening(port: int) -> dict[str, int]:
    """The sockets that listen on a port, as links in /proc name them → their users."""
    sockets = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            local_address, state, user, inode = fields[1], fields[3], fields[7], fields[9]
            if state == "0A" and int(local_address.rpartition(":")[2], 16) == port:
                sockets[f"socket:[{inode}]"] = int(user)
    return sockets

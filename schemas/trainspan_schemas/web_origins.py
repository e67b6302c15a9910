"""The names of a server, and what browsers' requests must pass there: its own host name, and no page of another site.

A page can give its own name the address of this machine (DNS rebinding), and then its script reaches every local port. It
cannot choose the Host header, which names the page's site.
"""

import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

__all__ = ["dialed_host", "is_own_host", "is_own_origin", "own_hosts"]

_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z_.-]+))(?::[0-9]{0,5})?")
"""RFC 9112, 3.2: a host with an optional port, without a user, a path or characters that browsers rewrite."""


def own_hosts(listening: str, allowed_hosts: str) -> frozenset[str]:
    """The names, in lower case, by which a server on the host `listening` may be called; `allowed_hosts` has commas."""
    names = ("localhost", socket.gethostname(), listening, *allowed_hosts.split(","))
    return frozenset(name.strip().lower() for name in names) - {""}


def is_own_host(header: str, hosts: frozenset[str]) -> bool:
    """Whether a Host header names one of `hosts` or any address: nobody can rebind an address."""
    match = _HOST.fullmatch(header)
    if match is None:
        return False
    name = (match["ipv6"] or match["name"]).lower()
    if name in hosts:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_own_origin(origin: str, host: str) -> bool:
    """Whether an Origin header is that of a page from the server which the Host header `host` names."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def dialed_host(host: str) -> str:
    """The host, for a URL, at which a listener on `host` answers on this machine: loopback if it listens on all addresses."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    if address.version == 4:
        return "127.0.0.1" if address.is_unspecified else host
    return "[::1]" if address.is_unspecified else f"[{address}]"

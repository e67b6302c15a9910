"""Refuses requests that a browser makes for another site's page, whether it uses our name or has rebound its own to us."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

__all__ = ["ForeignError", "check_origin"]


class ForeignError(Exception):
    """A request that was not meant for this server, or not made by its own pages."""


def check_origin(headers: Mapping[str, str], hosts: frozenset[str] | None) -> None:
    """Raises ForeignError if `host` is a name that is not in `hosts`, or `origin` is another site.

    None allows any host. A foreign name server cannot rebind an address, so addresses are always allowed.
    """
    host = headers.get("host", "")
    if hosts is not None and not _is_address_or_among(host, hosts):
        raise ForeignError(f"Host {host[:100]!r} is not this collector: use its address, or list it in allowed_hosts")
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        raise ForeignError(f"a page from {origin[:100]!r} may not send requests to this collector")


def _netloc(origin: str) -> str | None:
    """None if it is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _is_address_or_among(header: str, hosts: frozenset[str]) -> bool:
    try:
        name = (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return False
    if name in hosts:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

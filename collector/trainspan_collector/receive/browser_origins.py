"""Refuses requests that a browser makes for another site's page, whether it uses our name or has rebound its own to us."""

from collections.abc import Mapping

from trainspan_schemas.web_origins import is_own_host, is_own_origin

__all__ = ["ForeignError", "check_origin"]


class ForeignError(Exception):
    """A request that was not meant for this server, or not made by its own pages."""


def check_origin(headers: Mapping[str, str], hosts: frozenset[str] | None) -> None:
    """Raises ForeignError if `host` is a name that is not in `hosts`, or `origin` is another site.

    None allows any host. A foreign name server cannot rebind an address, so addresses are always allowed.
    """
    host = headers.get("host", "")
    if hosts is not None and not is_own_host(host, hosts):
        raise ForeignError(f"Host {host[:100]!r} is not this collector: use its address, or list it in allowed_hosts")
    origin = headers.get("origin")
    if origin is not None and not is_own_origin(origin, host):
        raise ForeignError(f"a page from {origin[:100]!r} may not send requests to this collector")

"""The credentials that a sender of telemetry uses by default.

Tokens of a state folder are sent only to the collector on this machine, never to another host.
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from trainspan_schemas.errors import ConfigError
from trainspan_schemas.home import store_path
from trainspan_schemas.store.access import running_collector
from trainspan_schemas.store.endpoint import headers_of, is_this_machine
from trainspan_schemas.store.roles import home_token_file, make_home_token_file, otlp_headers_of

__all__ = ["known_headers", "sender_headers", "token_advice", "without_credentials"]

_HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS"
_SIGNALS: Final = ("TRACES", "LOGS", "METRICS")
_OTLP_PORT: Final = 4317


def sender_headers(
    role: str, collector: str, environ: Mapping[str, str], *, token_file: str | None = None, store: str | None = None
) -> str | None:
    """The headers that `role` sends to `collector`, a URL, as in OTEL_EXPORTER_OTLP_HEADERS; None: that variable's value.

    The first source that applies: `token_file`; the file that the running collector of `store` names; a token in the
    environment; for a collector on this machine the state folder's file, created if it does not exist. Raises ConfigError.
    """
    if token_file:
        return otlp_headers_of(token_file, role)
    given = headers_of(environ.get(_HEADERS, ""))
    credentials = known_headers(role, collector, store=store)
    if credentials is None and _is_for_home(collector, environ):
        credentials = otlp_headers_of(make_home_token_file(), role)
    if credentials is None:
        return None
    others = (f"{key}={quote(value)}" for key, value in given.items() if key != "authorization")
    return ",".join((*others, credentials))


def token_advice(
    role: str, collector: str, environ: Mapping[str, str], *, token_file: str | None = None, store: str | None = None
) -> str:
    """What to do if `collector` refuses the token that `sender_headers` with these arguments has found."""
    if token_file:
        return f"put its token for the role {role} into {token_file}"
    if known_headers(role, collector, store=store) is not None:
        return (
            f"the token for the role {role} is from the running collector of {store_path(store)}: start that one again"
        )
    if _is_for_home(collector, environ):
        return (
            f"the token for the role {role} is that of {home_token_file().resolve()}: set TRAINSPAN_HOME to the collector's, "
            "or a token_file"
        )
    if "authorization" in headers_of(environ.get(_HEADERS, "")):
        return f"put its token for the role {role} into {_HEADERS}, or set a token_file"
    return f"there is no token for the role {role}: set a token_file with the collector's"


def _is_for_home(collector: str, environ: Mapping[str, str]) -> bool:
    """Whether the state folder's token goes to a collector that no other source has one for."""
    return "authorization" not in headers_of(environ.get(_HEADERS, "")) and is_this_machine(collector)


def known_headers(role: str, collector: str, *, store: str | None = None) -> str | None:
    """The same for the running collector of `store` if it listens at `collector`; None if it has no token for this role."""
    running = running_collector(store_path(store))
    if running is None or running.token_file is None:
        return None
    addresses = (address for address in (running.grpc, running.http) if address)
    if not is_this_machine(collector) or _port(collector) not in {
        int(address.rpartition(":")[2]) for address in addresses
    }:
        return None
    try:
        return otlp_headers_of(running.token_file, role)
    except ConfigError:  # a file of the user need not have every role
        return None


def without_credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without OTLP headers, for a process that must not send with this one's credentials.

    Headers of a signal with a separate endpoint stay: they are for that endpoint.
    """
    rest = {name: value for name, value in environ.items() if name != _HEADERS}
    for signal in _SIGNALS:
        if not rest.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"):
            rest.pop(f"OTEL_EXPORTER_OTLP_{signal}_HEADERS", None)
    return rest


def _port(url: str) -> int:
    return urlsplit(url if "//" in url else f"//{url}").port or _OTLP_PORT

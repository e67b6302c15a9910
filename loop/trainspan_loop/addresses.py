"""The addresses of a project's processes, by its settings, and whether it is they that answer there."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from trainspan_schemas.config.load import own_endpoint, own_policy_server
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import ConfigError, PolicyServerError, ProcessError
from trainspan_schemas.home import home, served_url, store_path, token_digest
from trainspan_schemas.policy_server import read_state
from trainspan_schemas.ports import Listener, blocked, free_port, port_holder
from trainspan_schemas.store.access import StoreAddress, running_collector
from trainspan_schemas.store.collectors import Collectors, address_of
from trainspan_schemas.store.endpoint import is_loopback
from trainspan_schemas.web_origins import dialed_host

__all__ = [
    "agents_url_of",
    "check_collector",
    "check_policy_server",
    "check_ports",
    "collectors_of",
    "foreign_collector",
    "foreign_policy_server",
    "policy_servers_of",
    "stores_of",
    "with_server_port",
]

_ASK_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.2
_ANNOUNCED_S: Final = 2.0
"""A collector listens a moment before its address file says so."""
_OTHER_PORTS: Final = "take other ports with --set ports.base=0 or TRAINSPAN_PORTS__BASE=0"


def policy_servers_of(chosen: Settings) -> tuple[str, ...]:
    """The roots of the policy servers: those behind a balancer, otherwise that of `[serving]`; none if its port is unknown."""
    own_server = own_policy_server(chosen.serving)
    urls = chosen.rollouts.policy_servers or ((own_server,) if own_server else ())
    return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)


def agents_url_of(chosen: Settings) -> str:
    """The URL that the loop gives to agents: `policy_url` if that was set, otherwise the only server's.

    It counts for several servers and for one that other machines can reach. A server of this machine alone has one URL.
    """
    first, *others = policy_servers_of(chosen)
    is_set = chosen.rollouts.policy_url != f"{own_policy_server(chosen.serving)}/v1"
    is_reachable = bool(chosen.rollouts.policy_servers) or not _is_local(chosen.serving.host)
    if others or (is_set and is_reachable):
        return chosen.rollouts.policy_url
    return f"{first}/v1"


def collectors_of(chosen: Settings, address: StoreAddress) -> str:
    """The URL of a collector of this machine for senders: `endpoints` if it was set, for one that other machines can reach."""
    assert address.grpc is not None, "it takes telemetry"
    host, _, port = address.grpc.rpartition(":")
    endpoints = chosen.collector.endpoints
    if endpoints != (own_endpoint(chosen.collector),) and not _is_local(host):
        return ",".join(endpoints)
    return f"{'https' if address.tls else 'http'}://{dialed_host(host)}:{port}"


def stores_of(chosen: Settings, named: Sequence[str] | None = None) -> tuple[str, ...]:
    """The stores that a command reads: those named by its option, else those of the settings."""
    return tuple(named or chosen.collector.stores or (str(store_path(chosen.collector.store)),))


def with_server_port(chosen: Settings) -> Settings:
    """The settings with a port for a policy server that may take any free one: that of the last server if it is free."""
    if chosen.serving.port:
        return chosen
    port = free_port(chosen.serving.host, urlsplit(served_url() or "").port or 0)
    serving = replace(chosen.serving, port=port)
    rollouts, url = chosen.rollouts, f"{own_policy_server(serving)}/v1"
    followed = rollouts.policy_url in ("", f"{own_policy_server(chosen.serving)}/v1")
    return replace(chosen, serving=serving, rollouts=replace(rollouts, policy_url=url) if followed else rollouts)


def check_ports(chosen: Settings, *, wait_s: float) -> None:
    """Raises ProcessError that names every port that the loop's own processes need and that is still in use after `wait_s`."""
    wanted: list[Listener | None] = []
    if not chosen.rollouts.policy_servers:
        wanted.append(Listener("[serving] port", chosen.serving.host, chosen.serving.port))
    collector = chosen.collector
    if not collector.stores and running_collector(store_path(collector.store)) is None:
        addresses = {"grpc": collector.grpc, "http": collector.http, "flight": collector.flight}
        wanted += [Listener.at(f"[collector] {name}", address) for name, address in addresses.items()]
    deadline = time.monotonic() + wait_s
    while trouble := blocked(listener for listener in wanted if listener):
        if time.monotonic() > deadline:
            raise ProcessError(f"{trouble}: stop that, or {_OTHER_PORTS}")
        time.sleep(_RETRY_S)


def check_collector(chosen: Settings, urls: str) -> None:
    """Raises ConfigError if the collector of another state folder answers at the address of this one's; `urls` have commas."""
    for url in Collectors.of(urls).urls:
        if trouble := foreign_collector(chosen, url):
            raise ConfigError(trouble)


def foreign_collector(chosen: Settings, url: str) -> str | None:
    """Says whose collector answers at a URL if that is the address of this state folder's, and it is not.

    None if it is, if nothing answers, or if the URL was set: its token then decides.
    """
    endpoint = own_endpoint(chosen.collector)
    if endpoint is None or address_of(url) != address_of(endpoint):
        return None
    port, store = urlsplit(endpoint).port or 0, store_path(chosen.collector.store)
    deadline = time.monotonic() + _ANNOUNCED_S
    while True:
        running = running_collector(store)
        listens = [address for address in (running.grpc, running.http) if address] if running else []
        if any(address.endswith(f":{port}") for address in listens):
            return None
        if blocked([Listener("", urlsplit(endpoint).hostname or "", port)]) is None:
            return None
        if time.monotonic() > deadline:
            break
        time.sleep(_RETRY_S)
    return f"what listens at {url} is not the collector of {store} but {port_holder(port)}: stop it, or {_OTHER_PORTS}"


def check_policy_server(chosen: Settings, url: str) -> None:
    """Raises ConfigError without a URL, or if the policy server of another state folder answers at the address of this one's."""
    if not url:
        raise ConfigError(
            "no policy server is known: start `trainspan serve MODEL_DIR`, or give its URL, or none for agents that ask another "
            "model (policy_url, --policy-url)"
        )
    if trouble := foreign_policy_server(chosen, url):
        raise ConfigError(trouble)


def foreign_policy_server(chosen: Settings, url: str) -> str | None:
    """Says whose policy server answers at a URL if that is the address of this state folder's, and it is not; else None.

    The digest of its token shows whose it is; without that token its weights could not be swapped either.
    """
    root = url.rstrip("/").removesuffix("/v1")
    if root != own_policy_server(chosen.serving):
        return None
    try:
        if read_state(root, _ASK_TIMEOUT_S).token_digest == token_digest():
            return None
    except PolicyServerError:  # nothing, or nothing that could be mistaken for one
        return None
    holder = port_holder(urlsplit(root).port or 0)
    return f"the policy server at {root} is not that of {home().resolve()} but of {holder}: stop it, or {_OTHER_PORTS}"


def _is_local(host: str) -> bool:
    """Whether a listener on this host can be reached from this machine alone."""
    dialed = dialed_host(host)
    return is_loopback(dialed) and dialed.strip("[]") == host.strip("[]")

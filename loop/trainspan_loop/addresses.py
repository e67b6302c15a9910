"""The addresses of a project's processes, by its settings."""

from collections.abc import Sequence

from trainspan_schemas.config.load import own_endpoint, own_policy_server
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.home import store_path
from trainspan_schemas.store.access import StoreAddress
from trainspan_schemas.store.endpoint import is_loopback
from trainspan_schemas.web_origins import dialed_host

__all__ = ["agents_url_of", "collectors_of", "policy_servers_of", "stores_of"]


def policy_servers_of(chosen: Settings) -> tuple[str, ...]:
    """The roots of the policy servers: those behind a balancer, otherwise that of `[serving]`."""
    named = chosen.rollouts.policy_servers or (own_policy_server(chosen.serving),)
    return tuple(url.rstrip("/").removesuffix("/v1") for url in named)


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


def _is_local(host: str) -> bool:
    """Whether a listener on this host can be reached from this machine alone."""
    own = dialed_host(host)
    return is_loopback(own) and own.strip("[]") == host.strip("[]")

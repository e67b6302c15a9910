"""Swaps a checkpoint in at all of several policy servers, or at none.

First every server stages it: it copies and validates the files while requests go on. Then one server swaps; if its canary
refuses the checkpoint, no other is touched. The others follow at the same time; if one of them refuses it, all go back.
A server that does not answer is left out: it catches up before it listens again.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainspan_training.checkpoints.swap_request import (
    PolicyAddress,
    Swap,
    in_service,
    publish_to_one,
    served_names,
    stage,
)

__all__ = ["publish", "served_folders"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a server serves before the change."""

    checkpoint: str
    version: int


def publish(address: PolicyAddress, checkpoint: str, version: int, *, retry_for_s: float, was_there: bool) -> Swap:
    """Swaps at each server of the address; with one server, this is `publish_to_one`.

    `refused` if a canary refused the checkpoint, and then the earlier ones are in service again; `swapped` if at least one
    server took it and none refused it: the answer is that of the first, and `servers` has the outcome of each.
    """
    servers = address.servers
    if len(servers) == 1:
        return publish_to_one(address, checkpoint, version, retry_for_s=retry_for_s, was_there=was_there)
    places = {server: place for server in servers if (place := _place(server)) is not None}
    outcomes = {server: Swap("unreachable", {"error": "no answer"}) for server in servers if server not in places}
    staged = _each(list(places), lambda server: stage(server, checkpoint, version, retry_for_s))
    if unfit := [swap for swap in staged.values() if swap.outcome == "failed"]:
        return _joined(unfit[0], {**outcomes, **staged})
    outcomes |= {server: swap for server, swap in staged.items() if swap.outcome != "swapped"}
    ready = [server for server, swap in staged.items() if swap.outcome == "swapped"]

    def swap_one(server: PolicyAddress) -> Swap:
        return publish_to_one(server, checkpoint, version, retry_for_s=retry_for_s, was_there=True)

    first: Swap | None = None
    while ready and first is None:
        leader = ready.pop(0)
        outcomes[leader] = swap = swap_one(leader)
        if swap.outcome == "refused":
            return _joined(swap, outcomes)
        first = swap if swap.outcome == "swapped" else None
    if first is None:
        return _joined(next(iter(outcomes.values())), outcomes)
    outcomes |= _each(ready, swap_one)
    if refusal := next((swap for swap in outcomes.values() if swap.outcome == "refused"), None):
        taken = [server for server, swap in outcomes.items() if swap.outcome == "swapped"]
        _go_back(taken, places, retry_for_s)
        return _joined(refusal, outcomes)
    return _joined(first, outcomes)


def served_folders(address: PolicyAddress) -> frozenset[str]:
    """Names of the folders that any of the servers serves the policy from; see `served_names`."""
    return frozenset().union(*(served_names(server) for server in address.servers))


def _place(server: PolicyAddress) -> _Place | None:
    own = in_service(server)
    checkpoint, version = own.get("checkpoint"), own.get("version")
    return _Place(checkpoint, version) if isinstance(checkpoint, str) and isinstance(version, int) else None


def _each(servers: Sequence[PolicyAddress], ask: Any) -> dict[PolicyAddress, Swap]:
    if not servers:
        return {}
    with ThreadPoolExecutor(len(servers)) as pool:
        return dict(zip(servers, pool.map(ask, servers), strict=True))


def _go_back(taken: Sequence[PolicyAddress], places: Mapping[PolicyAddress, _Place], retry_for_s: float) -> None:
    def back(server: PolicyAddress) -> Swap:
        place = places[server]
        return publish_to_one(server, place.checkpoint, place.version, retry_for_s=retry_for_s, was_there=True)

    for server, swap in _each(taken, back).items():
        if swap.outcome != "swapped":
            log.error("server=%s stays with the refused checkpoint: %s", server.base, swap.error)


def _joined(swap: Swap, outcomes: Mapping[PolicyAddress, Swap]) -> Swap:
    left = {server: one for server, one in outcomes.items() if one.outcome != swap.outcome}
    for server, one in left.items():
        log.warning("server=%s outcome=%s: %s", server.base, one.outcome, one.error)
    servers = {server.base: {"outcome": one.outcome, "error": one.error} for server, one in outcomes.items()}
    return Swap(swap.outcome, {**(swap.answer or {}), "servers": servers})

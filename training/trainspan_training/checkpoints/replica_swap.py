"""Swaps a checkpoint in at all of several policy servers, or at none.

First every server stages it: it copies and validates the files while requests go on. Then one server swaps; if its canary
refuses the checkpoint, no other is touched. The others follow at the same time. If one of them refuses it, every server is
asked what it serves, and those that serve the refused checkpoint go back to the accepted one.
A server that does not answer at first is asked once more at the end. One that still does not, or cannot copy, is left out: it
catches up before it listens again, or with the next checkpoint.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trainspan_schemas.policy_server import Offer, ServerState, SwapAnswer
from trainspan_training.checkpoints.swap_request import (
    PolicyAddress,
    Swap,
    always,
    publish_to_one,
    served_names,
    stage,
    state_at,
)

__all__ = ["publish", "served_folders"]

log = logging.getLogger(__name__)

_POLL_S = 0.5
_T = TypeVar("_T")


def publish(
    address: PolicyAddress,
    offer: Offer,
    accepted: Offer | None,
    *,
    retry_for_s: float,
    was_there: bool,
    is_wanted: Callable[[], bool] = always,
) -> Swap:
    """Swaps at each server of the address; `accepted` is what goes back in service if the offer is refused.

    `refused` if a canary refused the checkpoint, `unfit` if it does not fit the model of a server, and then no server that
    answers serves it; `swapped` if at least one server took it and none refused it: the answer is that of the first. With
    several servers, `servers` in the answer has the outcome of each. No server is asked to swap once the offer `is_wanted` no
    longer.
    """
    servers = address.servers
    if len(servers) == 1:
        swap = publish_to_one(address, offer, retry_for_s=retry_for_s, was_there=was_there, is_wanted=is_wanted)
        if swap.outcome == "refused":
            _take_out({servers[0]: swap}, {}, offer, accepted, retry_for_s)
        return swap
    before = {server: state for server, state in _each(servers, state_at).items() if state}
    there = [*before] or (servers if was_there else ())
    swap, outcomes = _publish_to_all(servers, there, offer, retry_for_s, is_wanted)
    if swap.outcome == "refused":
        outcomes |= _take_out(outcomes, before, offer, accepted, retry_for_s)
    return _joined(swap, outcomes)


def served_folders(address: PolicyAddress) -> frozenset[str]:
    """Names of the folders that any of the servers serves the policy from; see `served_names`."""
    return frozenset().union(*(served_names(server) for server in address.servers))


def _publish_to_all(
    servers: Sequence[PolicyAddress],
    there: Sequence[PolicyAddress],
    offer: Offer,
    retry_for_s: float,
    is_wanted: Callable[[], bool],
) -> tuple[Swap, dict[PolicyAddress, Swap]]:
    """The result and the outcome of each server; `there` are those to wait for."""
    outcomes = {server: Swap("unreachable", {"error": f"no answer from {server.base}"}) for server in servers}
    outcomes |= _each(there, lambda server: stage(server, offer, retry_for_s))
    if unfit := next(((server, swap) for server, swap in outcomes.items() if swap.outcome == "unfit"), None):
        server, swap = unfit
        return Swap("unfit", {**(swap.answer or SwapAnswer()), "error": f"{server.base}: {swap.error}"}), outcomes
    ready = [server for server, swap in outcomes.items() if swap.outcome == "staged"]

    def swap_one(server: PolicyAddress) -> Swap:
        return publish_to_one(server, offer, retry_for_s=retry_for_s, was_there=True, is_wanted=is_wanted)

    first: Swap | None = None
    while ready and first is None:
        leader = ready.pop(0)
        outcomes[leader] = swap = swap_one(leader)
        if swap.outcome == "refused":
            return swap, outcomes
        first = swap if swap.outcome == "swapped" else None
    if first is None:
        return next(iter(outcomes.values())), outcomes
    outcomes |= _each(ready, swap_one)
    away = [server for server in servers if server not in there]
    late = [server for server, state in _each(away, state_at).items() if state]
    outcomes |= _each(late, swap_one)
    refusal = next((swap for swap in outcomes.values() if swap.outcome == "refused"), None)
    return refusal or first, outcomes


def _each(servers: Sequence[PolicyAddress], ask: Callable[[PolicyAddress], _T]) -> dict[PolicyAddress, _T]:
    if not servers:
        return {}
    with ThreadPoolExecutor(len(servers)) as pool:
        return dict(zip(servers, pool.map(ask, servers), strict=True))


def _take_out(
    outcomes: Mapping[PolicyAddress, Swap],
    before: Mapping[PolicyAddress, ServerState],
    refused: Offer,
    accepted: Offer | None,
    retry_for_s: float,
) -> dict[PolicyAddress, Swap]:
    """Sends each server that serves the refused checkpoint back to the accepted one, else to what it served before.

    Also those whose answer did not arrive, or that an earlier trainer had swapped: what they say now counts. Returns the
    outcomes of those that had swapped and went back.
    """

    def back(server: PolicyAddress) -> str | None:
        outcome = outcomes[server].outcome
        may_serve_it = outcome == "swapped" or (server in before and outcome != "refused")
        state = _state_when_idle(server, retry_for_s, retry_for_s if may_serve_it else 0.0)
        if state is None:
            return "it does not answer, and may serve it"
        if not state.serves(refused, server.policy):
            return None
        target = accepted or _offer_of(before.get(server), server.policy)
        if target is None or target.checkpoint == refused.checkpoint:
            return "it has served no accepted checkpoint"
        return publish_to_one(server, target, retry_for_s=retry_for_s, was_there=True).error

    troubles = _each([*outcomes], back)
    for server, trouble in troubles.items():
        if trouble is not None:
            log.error("server=%s stays with refused checkpoint=%s: %s", server.base, refused.checkpoint, trouble)
    went_back = Swap("refused", {"error": "it went back, since another server refused the checkpoint"})
    return {
        server: went_back for server, swap in outcomes.items() if swap.outcome == "swapped" and troubles[server] is None
    }


def _state_when_idle(server: PolicyAddress, most_s: float, silent_s: float) -> ServerState | None:
    """The server's state once no change is in progress; None if it is silent for `silent_s`."""
    began = time.monotonic()
    while (state := state_at(server)) is None or state.changing:
        if time.monotonic() - began >= (silent_s if state is None else most_s):
            break
        time.sleep(_POLL_S)
    return state


def _offer_of(state: ServerState | None, policy: str | None) -> Offer | None:
    """What a server served; None if it did not answer, or has no such policy."""
    if state is None or not (policy is None or policy in state.policies):
        return None
    earlier = state.of(policy)
    return Offer(earlier.checkpoint, earlier.version, earlier.weights_sha256)


def _joined(swap: Swap, outcomes: Mapping[PolicyAddress, Swap]) -> Swap:
    for server, reply in outcomes.items():
        if reply.outcome not in (swap.outcome, "staged"):
            log.warning("server=%s outcome=%s: %s", server.base, reply.outcome, reply.error)
    servers = {server.base: {"outcome": reply.outcome, "error": reply.error} for server, reply in outcomes.items()}
    return Swap(swap.outcome, {**(swap.answer or SwapAnswer()), "servers": servers})

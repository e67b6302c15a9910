"""Asks the policy server to swap to a checkpoint, retrying while it is busy."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from trainspan_schemas.errors import PolicyServerError
from trainspan_schemas.files.objects import Objects, check_url
from trainspan_schemas.home import token
from trainspan_schemas.http_client import ask
from trainspan_schemas.policy_server import Offer, Reason, ServerState, SwapAnswer, read_state
from trainspan_training.checkpoints.ledger import Event

__all__ = [
    "EVENTS",
    "Outcome",
    "PolicyAddress",
    "Swap",
    "always",
    "publish_to_one",
    "served_dtype",
    "served_names",
    "stage",
    "state_at",
]

log = logging.getLogger(__name__)

Outcome = Literal["swapped", "staged", "refused", "unfit", "busy", "unreachable", "failed", "off"]
"""`refused`: the canary failed, and the server keeps the old policy; `unfit`: the files do not fit the served model; `staged`:
the server could swap and was not asked to; `failed`: it answered with another error, which says nothing of the checkpoint, or
it was not asked because the checkpoint was withdrawn."""

EVENTS: dict[Outcome, Event] = {
    "swapped": "published",
    "staged": "unpublished",
    "refused": "refused",
    "unfit": "unpublished",
    "busy": "unpublished",
    "unreachable": "unpublished",
    "failed": "unpublished",
    "off": "unpublished",
}

_ASK_TIMEOUT_S = 10.0
_LEAST_TRY_S = 5.0
_LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class PolicyAddress:
    """A policy in service, at one server or at several."""

    url: str
    """The server's base address (a trailing `/v1` is ignored), or several with commas; "none": no server."""
    policy: str | None = None
    """Its name, on a server with several."""
    checkpoints_url: str | None = None
    """Where its servers copy checkpoints from; None: they see the trainer's folder."""

    @property
    def checkpoints(self) -> Objects | None:
        """The policy's checkpoints under the URL. Raises UsageError if the URL is malformed or has credentials in it."""
        if self.checkpoints_url is None or self.url == "none":
            return None
        objects = Objects(check_url(self.checkpoints_url))
        return objects if self.policy is None else objects.under(self.policy)

    @property
    def servers(self) -> tuple["PolicyAddress", ...]:
        """The address at each server."""
        return tuple(replace(self, url=url.strip()) for url in self.url.split(",") if url.strip())

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Swap:
    """The result of a swap request."""

    outcome: Outcome
    answer: SwapAnswer | None
    """The server's answer, or {"error": …}; None if publishing is off."""

    @property
    def error(self) -> str | None:
        return None if self.answer is None else self.answer.get("error")

    @property
    def left_out(self) -> dict[str, str]:
        """Of several servers, the base addresses of those that did not swap, with their errors."""
        servers = (self.answer or SwapAnswer()).get("servers", {})
        return {
            base: str(swap["error"] or swap["outcome"])
            for base, swap in servers.items()
            if swap["outcome"] != "swapped"
        }


def always() -> bool:
    """The answer for a checkpoint that no one else can withdraw."""
    return True


def publish_to_one(
    address: PolicyAddress, offer: Offer, *, retry_for_s: float, was_there: bool, is_wanted: Callable[[], bool] = always
) -> Swap:
    """POST /trainspan/policy; does nothing if the address has no server.

    Retries for up to `retry_for_s` while the server is busy (503) and, if it `was_there` a moment ago, while it is
    unreachable: its supervisor restarts it after a crash. While it copies, the time begins again with each step forward.
    Asks nothing more once the offer `is_wanted` no longer.
    """
    if address.url == "none":
        return Swap("off", None)
    return _retried(address, "policy", offer, retry_for_s, was_there=was_there, is_wanted=is_wanted)


def stage(address: PolicyAddress, offer: Offer, retry_for_s: float) -> Swap:
    """POST /trainspan/stage: the server gets and validates the checkpoint; `staged` if it can be swapped in."""
    swap = _retried(address, "stage", offer, retry_for_s, was_there=True)
    return replace(swap, outcome="staged") if swap.outcome == "swapped" else swap


def _retried(
    address: PolicyAddress,
    what: str,
    offer: Offer,
    retry_for_s: float,
    *,
    was_there: bool,
    is_wanted: Callable[[], bool] = always,
) -> Swap:
    deadline = time.monotonic() + retry_for_s
    copied_bytes: Any = None
    is_reported = False
    while True:
        if not is_wanted():
            return Swap("failed", {"error": f"{offer.checkpoint} was withdrawn"})
        swap, wait_s = _try(address, what, offer, max(_LEAST_TRY_S, deadline - time.monotonic()))
        answer = swap.answer or SwapAnswer()
        if answer.get("reason") == Reason.COPYING and answer.get("copied_bytes") != copied_bytes:
            copied_bytes, deadline = answer.get("copied_bytes"), time.monotonic() + retry_for_s
        may_pass = swap.outcome == "busy" or (swap.outcome == "unreachable" and was_there)
        if not may_pass or time.monotonic() + wait_s >= deadline:
            return swap
        if not is_reported:
            log.warning(
                "checkpoint=%s is waiting for the policy server for at most %g s: %s",
                offer.checkpoint,
                retry_for_s,
                swap.error,
            )
        is_reported = True
        time.sleep(wait_s)


def served_dtype(url: str) -> str | None:
    """The dtype that the first policy server that answers at `url` computes in, e.g. "bfloat16"; None without one."""
    states = (state_at(server) for server in PolicyAddress(url).servers)
    return next((state.dtype for state in states if state), None)


def state_at(address: PolicyAddress) -> ServerState | None:
    """The state of one server; None without an answer."""
    if address.url == "none":
        return None
    try:
        return read_state(address.base, _ASK_TIMEOUT_S)
    except PolicyServerError:
        return None


def served_names(address: PolicyAddress) -> frozenset[str]:
    """Names of the folders that one server serves the policy from, including an adapter's base; empty without an answer."""
    state = state_at(address)
    if state is None:
        return frozenset()
    served = state.alone if address.policy is None else state.policies.get(address.policy)
    return frozenset((state.base, *([served.checkpoint] if served else [])))


def _try(address: PolicyAddress, what: str, offer: Offer, timeout_s: float) -> tuple[Swap, float]:
    """Makes one request; returns its result and the seconds to wait before a retry."""
    base = address.base
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token()}"}
    body = offer.to_json(address.policy).encode()
    try:
        answer = ask(f"{base}/trainspan/{what}", body, headers, timeout_s=timeout_s)
    except ConnectionError as error:
        return Swap("unreachable", {"error": f"no answer from {base}: {error}"}), 1.0
    record = _parsed(answer.body)
    if answer.is_ok:
        return Swap("swapped", record), 0.0
    record.setdefault("error", f"HTTP {answer.status}")
    return Swap(_outcome_of(answer.status, record), record), _retry_after_s(answer.retry_after)


def _outcome_of(status: int, answer: SwapAnswer) -> Outcome:
    """A 409 without that reason is not from the canary; a proxy in front of a restarting server answers 502 to 504."""
    reason = answer.get("reason")
    if status == 409 and reason == Reason.CANARY_FAILED:
        return "refused"
    if status == 400 and reason == Reason.UNFIT:
        return "unfit"
    if reason == Reason.COPY_FAILED:
        return "failed"  # the server has tried long enough
    return "busy" if status in (502, 503, 504) else "failed"


def _retry_after_s(header: str | None) -> float:
    """Parses seconds only; a date is not worth parsing here."""
    asked = float(header) if header and header.isdigit() else 1.0
    return min(max(asked, 0.1), _LONGEST_WAIT_S)


def _parsed(body: bytes) -> SwapAnswer:
    try:
        answer = json.loads(body)
    except ValueError:
        return {"error": body[:200].decode(errors="replace")} if body else {}
    return cast("SwapAnswer", answer) if isinstance(answer, dict) else {"error": str(answer)}

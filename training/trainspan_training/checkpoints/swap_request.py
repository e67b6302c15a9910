"""Asks the policy server to swap to a checkpoint, retrying while it is busy."""

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Literal

from trainspan_schemas.home import token
from trainspan_training.checkpoints.ledger import Event

__all__ = [
    "EVENTS",
    "Outcome",
    "PolicyAddress",
    "Swap",
    "in_service",
    "publish_to_one",
    "served_dtype",
    "served_names",
    "stage",
]

log = logging.getLogger(__name__)

Outcome = Literal["swapped", "refused", "busy", "unreachable", "failed", "off"]
"""`refused`: the canary failed, and the server keeps the old policy; `failed`: it answered with another error."""

EVENTS: dict[Outcome, Event] = {
    "swapped": "published",
    "refused": "refused",
    "busy": "unpublished",
    "unreachable": "unpublished",
    "failed": "unpublished",
    "off": "unpublished",
}

CANARY_FAILED = "canary_failed"
"""The `reason` in the server's answer if the checkpoint itself is at fault."""
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

    @property
    def servers(self) -> tuple["PolicyAddress", ...]:
        """The address at each server."""
        return tuple(PolicyAddress(url.strip(), self.policy) for url in self.url.split(",") if url.strip())

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Swap:
    """The result of a swap request."""

    outcome: Outcome
    answer: dict[str, Any] | None
    """The server's answer, or {"error": …}; None if publishing is off."""

    @property
    def error(self) -> str | None:
        return None if self.answer is None else self.answer.get("error")


def publish_to_one(
    address: PolicyAddress, checkpoint: str, version: int, *, retry_for_s: float, was_there: bool
) -> Swap:
    """POST /trainspan/policy; does nothing if the address has no server.

    Retries for up to `retry_for_s` while the server is busy (503) and, if it `was_there` a moment ago, while it is
    unreachable: its supervisor restarts it after a crash.
    """
    if address.url == "none":
        return Swap("off", None)
    return _retried(address, "policy", checkpoint, version, retry_for_s, was_there=was_there)


def stage(address: PolicyAddress, checkpoint: str, version: int, retry_for_s: float) -> Swap:
    """POST /trainspan/stage: the server gets and validates the checkpoint; `swapped` if it can be swapped in."""
    return _retried(address, "stage", checkpoint, version, retry_for_s, was_there=True)


def _retried(
    address: PolicyAddress, what: str, checkpoint: str, version: int, retry_for_s: float, *, was_there: bool
) -> Swap:
    deadline = time.monotonic() + retry_for_s
    is_reported = False
    while True:
        swap, wait_s = _try(address, what, checkpoint, version, max(_LEAST_TRY_S, deadline - time.monotonic()))
        may_pass = swap.outcome == "busy" or (swap.outcome == "unreachable" and was_there)
        if not may_pass or time.monotonic() + wait_s >= deadline:
            return swap
        if not is_reported:
            log.warning(
                "checkpoint=%s is waiting for the policy server for at most %g s: %s",
                checkpoint,
                retry_for_s,
                swap.error,
            )
        is_reported = True
        time.sleep(wait_s)


def served_dtype(url: str) -> str | None:
    """The dtype that the first policy server that answers at `url` computes in, e.g. "bfloat16"; None without one."""
    states = (_state(server.url) for server in PolicyAddress(url).servers)
    dtype = next((state.get("dtype") for state in states if state), None)
    return dtype if isinstance(dtype, str) else None


def in_service(address: PolicyAddress) -> dict[str, Any]:
    """What one server says of the policy: `checkpoint`, `version` and more, and the full weights as `base`; empty without
    an answer."""
    state = _state(address.url)
    policies = state.get("policies")
    own = policies.get(address.policy) if isinstance(policies, dict) and address.policy else state
    return {**(own if isinstance(own, dict) else {}), "base": state.get("base")}


def served_names(address: PolicyAddress) -> frozenset[str]:
    """Names of the folders that one server serves the policy from, including an adapter's base; empty without an answer."""
    own = in_service(address)
    return frozenset(name for name in (own.get("checkpoint"), own.get("base")) if isinstance(name, str))


def _try(address: PolicyAddress, what: str, checkpoint: str, version: int, timeout_s: float) -> tuple[Swap, float]:
    """Makes one request; returns its result and the seconds to wait before a retry."""
    base, named = address.base, {} if address.policy is None else {"policy": address.policy}
    request = urllib.request.Request(
        f"{base}/trainspan/{what}",
        data=json.dumps({**named, "checkpoint": checkpoint, "version": version}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {token()}"},
    )
    try:
        with _opener().open(request, timeout=timeout_s) as response:
            return Swap("swapped", _parsed(response.read())), 0.0
    except urllib.error.HTTPError as error:
        answer = _parsed(error.read())
        answer.setdefault("error", f"HTTP {error.code}")
        return Swap(_outcome_of(error.code, answer), answer), _retry_after_s(error.headers.get("Retry-After"))
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        return Swap("unreachable", {"error": f"no answer from {base}: {getattr(error, 'reason', error)}"}), 1.0


def _outcome_of(status: int, answer: dict[str, Any]) -> Outcome:
    """A 409 without that reason is not from the canary; a proxy in front of a restarting server answers 502 to 504."""
    if status == 409 and answer.get("reason") == CANARY_FAILED:
        return "refused"
    return "busy" if status in (502, 503, 504) else "failed"


def _retry_after_s(header: str | None) -> float:
    """Parses seconds only; a date is not worth parsing here."""
    asked = float(header) if header and header.isdigit() else 1.0
    return min(max(asked, 0.1), _LONGEST_WAIT_S)


def _state(url: str) -> dict[str, Any]:
    """`GET /trainspan/policy`; empty if the server does not answer."""
    if url == "none":
        return {}
    try:
        with _opener().open(f"{PolicyAddress(url).base}/trainspan/policy", timeout=_ASK_TIMEOUT_S) as response:
            return _parsed(response.read())
    except (OSError, http.client.HTTPException):
        return {}


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server: never through a proxy


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        return {"error": body[:200].decode(errors="replace")} if body else {}
    return parsed if isinstance(parsed, dict) else {"error": str(parsed)}

"""Asks the policy server to swap to a checkpoint."""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Literal

from trainspan_schemas.home import token

from .ledger import Event

__all__ = ["EVENTS", "Outcome", "Swap", "publish", "served_dtype"]

Outcome = Literal["swapped", "refused", "unreachable", "failed", "off"]
"""`refused`: the server keeps the old policy (409); `failed`: it answered with another error."""

EVENTS: dict[Outcome, Event] = {
    "swapped": "published",
    "refused": "refused",
    "unreachable": "unpublished",
    "failed": "unpublished",
    "off": "unpublished",
}

_ASK_TIMEOUT_S = 10.0
_TIMEOUT_S = 180.0
"""Covers draining running requests, loading the weights and scoring the canary."""


@dataclass(frozen=True, slots=True)
class Swap:
    """How it went."""

    outcome: Outcome
    answer: dict[str, Any] | None
    """What the server said, or {"error": …}; None where publishing is off."""

    @property
    def error(self) -> str | None:
        return None if self.answer is None else self.answer.get("error")


def publish(url: str, checkpoint: str, version: int) -> Swap:
    """POST /trainspan/policy at `url`, the server's base address (a trailing `/v1` is ignored); "none": nothing is done."""
    if url == "none":
        return Swap("off", None)
    base = url.rstrip("/").removesuffix("/v1")
    request = urllib.request.Request(
        f"{base}/trainspan/policy",
        data=json.dumps({"checkpoint": checkpoint, "version": version}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {token()}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is ours: never through a proxy
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            return Swap("swapped", _parsed(response.read()))
    except urllib.error.HTTPError as error:
        answer = _parsed(error.read())
        answer.setdefault("error", f"HTTP {error.code}")
        return Swap("refused" if error.code == 409 else "failed", answer)
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        return Swap("unreachable", {"error": f"no answer from {base}: {getattr(error, 'reason', error)}"})


def served_dtype(url: str) -> str | None:
    """What the policy server at `url` computes in, e.g. "bfloat16"; None if it cannot be asked."""
    if url == "none":
        return None
    base = url.rstrip("/").removesuffix("/v1")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{base}/trainspan/policy", timeout=_ASK_TIMEOUT_S) as response:
            dtype = _parsed(response.read()).get("dtype")
    except (OSError, http.client.HTTPException):
        return None
    return dtype if isinstance(dtype, str) else None


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        return {"error": body[:200].decode(errors="replace")} if body else {}
    return parsed if isinstance(parsed, dict) else {"error": str(parsed)}

"""The policies in service side by side, and which of them answers a request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.swap.canary import CanaryReport

__all__ = ["PolicyRow", "PolicyTable", "UnknownPolicyError", "model_of_body"]


class UnknownPolicyError(CheckpointError):
    """The request names no policy of this server, or none although there are several."""


@dataclass(slots=True)
class PolicyRow:
    """One policy in service, with the result of its last canary."""

    policy: ServedPolicy
    canary: CanaryReport | None = None


class PolicyTable:
    """The `base`, and the policies on it by name. Each of `agents` (name → policy) is answered by its own policy."""

    def __init__(self, base: ServedPolicy, named: Mapping[str, ServedPolicy], agents: Mapping[str, str]) -> None:
        self.base = PolicyRow(base)
        self.named = {name: PolicyRow(policy) for name, policy in named.items()}
        self._agents = agents

    def row(self, name: str | None) -> PolicyRow:
        """The policy that a swap request means. Raises UnknownPolicyError."""
        if name is None and self.named:
            raise UnknownPolicyError(
                f"this server has several policies: name one of {', '.join(self.named)} as `policy`"
            )
        if name is None:
            return self.base
        if name not in self.named:
            raise UnknownPolicyError(f"no policy {name[:80]!r}: this server has {', '.join(self.named) or 'only one'}")
        return self.named[name]

    def choose(self, model: str | None, agent: str | None) -> ServedPolicy:
        """The policy that answers: the one that the request names as its model, else its agent's, else the base."""
        row = self.named.get(model or "") or self.named.get(self._agents.get(agent or "", "")) or self.base
        return row.policy


def model_of_body(content: bytes) -> str | None:
    """The model that a request names; None if its content is not a JSON object with one."""
    try:
        request = json.loads(content)
    except (ValueError, RecursionError):
        return None
    model = request.get("model") if isinstance(request, dict) else None
    return model if isinstance(model, str) else None

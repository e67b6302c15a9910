"""The policies in service side by side, and which of them answers a request."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainspan_schemas.artifacts.checkpoint import META_FILE, CheckpointMeta, base_digest
from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.telemetry.status import KIND_PREFIX, CallKind
from trainspan_serving.checkpoints.served_policy import ServedPolicy
from trainspan_serving.process.server_plan import ServerPlan
from trainspan_serving.swap.canary import CanaryReport
from trainspan_serving.swap.engine import Engine

__all__ = ["PolicyRow", "PolicyTable", "UnknownPolicyError", "first_policies"]


class UnknownPolicyError(CheckpointError):
    """The request names no policy of this server, or none although there are several."""


@dataclass(slots=True)
class PolicyRow:
    """One policy in service, with the result of its last canary."""

    policy: ServedPolicy
    canary: CanaryReport | None = None


class PolicyTable:
    """The `base`, and the policies on it by name. Each of `agents` (name or `kind:NAME` → policy) is answered by its own policy."""

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

    def choose(self, model: str | None, agent: str | None, kind: CallKind | None = None) -> ServedPolicy:
        """The policy that answers: the one that the request names as its model, else that of its kind, else its agent's, else the
        base."""
        owner = self._agents.get(f"{KIND_PREFIX}{kind}") or self._agents.get(agent or "")
        row = self.named.get(model or "") or self.named.get(owner or "") or self.base
        return row.policy


async def first_policies(plan: ServerPlan, engine: Engine, folder: Path) -> PolicyTable:
    """The policies that a server starts with, on the full weights in `folder`; loads adapters that are not merged."""
    base = await asyncio.to_thread(base_digest, folder)

    async def policy(name: str, adapter: str | None, version: int, *, merge: bool) -> ServedPolicy:
        live = Path(adapter) if adapter and not merge else None
        loaded = await engine.add_adapter(live, version, name) if live else None
        merged = Path(adapter) if adapter and merge else None
        sha256 = await asyncio.to_thread(_weights_sha256, Path(adapter) if adapter else folder)
        return ServedPolicy(name, version, folder, loaded, merged, base, sha256)

    first = await policy(
        plan.settings.served_name, plan.adapter, plan.version, merge=bool(plan.settings.merge_adapters)
    )
    policies = {
        name: await policy(name, adapter_plan.adapter, adapter_plan.version, merge=False)
        for name, adapter_plan in plan.policies.items()
    }
    return PolicyTable(
        first, policies, {agent: name for name, adapter_plan in plan.policies.items() for agent in adapter_plan.agents}
    )


def _weights_sha256(folder: Path) -> str | None:
    return CheckpointMeta.read(folder).weights_sha256 if (folder / META_FILE).is_file() else None

"""Settings of several policies: adapters on one base model, each for the calls of its own agents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainspan_schemas.errors import ConfigError, UsageError
from trainspan_schemas.telemetry.status import REQUESTED_KINDS, kind_named

__all__ = ["PolicySettings", "agents_of_policies"]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`[policies.NAME]`: a policy of its own for some agents, as an adapter on the common base model."""

    agents: str | None = None
    """Comma-separated names of the agents whose calls this policy answers, or `kind:summary`, `kind:title`; default: NAME.

    A kind comes before an agent's name."""
    credit: str | None = None
    """How a rollout's rewards are assigned to its calls; default: that of `[dataset]`."""
    baseline: str | None = None
    """Advantage baseline; default: that of `[dataset]`."""
    gamma: float | None = None
    """Discount per call; default: that of `[dataset]`."""
    group_over: Literal["rollouts", "turns", "calls"] | None = None
    """What a call is compared with; default: that of `[dataset]`."""
    reward: str | None = None
    """Function that rewards each stored rollout; default: that of `[dataset]`."""
    reward_name: str | None = None
    """Evaluation that is the reward; default: that of `[dataset]`."""
    air: str | None = None
    """Rewards of single calls from signals of the trace; default: that of `[dataset]`."""
    learning_rate: float | None = None
    """Learning rate of AdamW; default: that of `[train]`."""
    rollouts_per_step: int | None = None
    """Rollouts in an optimizer step; default: that of `[train]`."""
    kl_coef: float | None = None
    """Coefficient of the KL divergence to the base model in the loss; default: that of `[train]`."""
    lora_rank: int | None = None
    """Rank of its adapter; default: that of `[model]`."""
    lora_alpha: float | None = None
    """The adapter's output is scaled by alpha / rank; default: that of `[model]`."""


def agents_of_policies(policies: Mapping[str, PolicySettings]) -> dict[str, tuple[str, ...]]:
    """Policy → the agents, or kinds of calls (`kind:NAME`), that it answers.

    Raises ConfigError if one is in two policies, or if a single request does not show the kind.
    """
    agents_of = {name: _agents(name, policy) for name, policy in policies.items()}
    owners: dict[str, str] = {}
    for name, agents in agents_of.items():
        for agent in agents:
            if owners.setdefault(agent, name) != name:
                raise ConfigError(
                    f"agent {agent!r} is in [policies.{owners[agent]}] and in [policies.{name}]: one policy answers an agent"
                )
    return agents_of


def _agents(name: str, policy: PolicySettings) -> tuple[str, ...]:
    if policy.agents is None:
        return (name,)
    agents = tuple(agent.strip() for agent in policy.agents.split(",") if agent.strip())
    if not agents:
        raise ConfigError(f"[policies.{name}] agents names no agent")
    for agent in agents:
        try:
            kind = kind_named(agent)
        except UsageError as error:
            raise ConfigError(f"[policies.{name}] agents: {error}") from None
        if kind is not None and kind not in REQUESTED_KINDS:
            raise ConfigError(
                f"[policies.{name}] agents has {agent!r}, which no single request shows: name the agents, or use "
                f"{' or '.join(f'kind:{each}' for each in REQUESTED_KINDS)}"
            )
    return agents

"""The demo's agent, unchanged, on a client that sends a different seed with each request, so that answers are reproducible."""

import hashlib
from collections.abc import Sequence
from typing import Any

from examples.calculator import agent
from trainspan._rollout.scope import current_scope

REAL = agent.client


def seed_of(rollout_id: str, messages: Sequence[Any]) -> int:
    """The seed of the answer to these messages in this rollout."""
    return int(hashlib.sha256(f"{rollout_id}/{len(messages)}".encode()).hexdigest()[:7], 16)


class Seeded:
    """The part of the client's interface that the agent uses."""

    @property
    def chat(self) -> "Seeded":
        return self

    completions = chat

    async def create(self, *, messages: list[Any], **options: Any) -> Any:
        scope = current_scope()
        assert scope is not None, "only called within a rollout"
        seed = seed_of(scope.identity.rollout_id, messages)
        return await REAL().chat.completions.create(messages=messages, seed=seed, temperature=1.0, **options)


async def solve(task: dict[str, Any]) -> str:
    agent.client = Seeded  # type: ignore[assignment]
    return await agent.solve(task)

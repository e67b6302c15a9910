"""Advantages of rollouts given as numbers by a test."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from trainspan_processing.credit.advantages import Credited, assign_advantages
from trainspan_processing.credit.plan import make_plan
from trainspan_processing.rewards.names import rollout_column, step_column
from trainspan_processing.tables import HISTORY
from trainspan_schemas.config.settings import DatasetSettings

Rewards = tuple[float | None, list[float | None]]


@dataclass
class Rollout:
    """Its own reward and those of its calls; one letter per call names its agent, others its state and its action."""

    reward: float | None
    steps: list[float | None]
    agents: str = ""
    kinds: Sequence[str] = ()
    """Of its calls; without any, all are `main`."""
    requests: Sequence[int] = ()
    """The number of each call's request; without any, each call has its own."""
    states: str = ""
    actions: str = ""
    group: int = 0
    more: dict[str, Rewards] = field(default_factory=dict)
    is_branch: bool = False
    values: Sequence[float | None] = ()
    """Measured values of the states before its calls; without any, none is known."""
    judge: str | None = None


def estimate(
    rollouts: Sequence[Rollout], *, history: Sequence[tuple[str, float]] = (), shuffled: bool = False, **settings: Any
) -> Credited:
    """Result of the plan of `settings`. The rollouts ended in order, after those of `history` (part, value)."""
    plan = make_plan(dataclasses.replace(DatasetSettings(), **settings), has_tasks=True)
    rows = []
    for number, rollout in enumerate(rollouts):
        rewards = {"reward": (rollout.reward, rollout.steps), **rollout.more}
        agents = rollout.agents or "a" * len(rollout.steps)
        for position, agent in enumerate(agents):
            row: dict[str, Any] = {"rollout": number, "position": position, "agent": agent}
            row |= {"turn": agents[:position].count(agent), "state": (rollout.states or "s" * 99)[position]}
            row["call_kind"] = rollout.kinds[position] if rollout.kinds else "main"
            row["request"] = rollout.requests[position] if rollout.requests else position + 1
            row["action"] = (rollout.actions or "x" * 99)[position]
            row["state_value"] = rollout.values[position] if rollout.values else None
            for name in (reward.name for reward in plan.rewards):
                whole, steps = rewards.get(name, (None, [None] * len(agents)))
                row |= {step_column(name): steps[position], rollout_column(name): whole}
            rows.append(row)
    columns = {column(reward.name): pl.Float64 for reward in plan.rewards for column in (step_column, rollout_column)}
    types = {
        "rollout": pl.UInt32,
        "position": pl.UInt32,
        "request": pl.UInt32,
        "turn": pl.Int32,
        "state_value": pl.Float64,
        **columns,
    }
    calls = pl.DataFrame(rows, schema_overrides=types)
    count = len(rollouts)
    facts = pl.DataFrame(
        {
            "rollout": range(count),
            "group": [rollout.group for rollout in rollouts],
            "run_id": ["run"] * count,
            "judge": [rollout.judge for rollout in rollouts],
            "end_ns": range(1_000, 1_000 + count),
            "rollout_id": [f"r{number:04d}" for number in range(count)],
            "attempt": [0] * count,
            "is_branch": [rollout.is_branch for rollout in rollouts],
        },
        schema_overrides={
            "rollout": pl.UInt32,
            "group": pl.UInt32,
            "attempt": pl.Int32,
            "end_ns": pl.Int64,
            "judge": pl.String,
        },
    )
    past = [(f"p{number:04d}", 0, "run", None, number, part, value) for number, (part, value) in enumerate(history)]
    if shuffled:
        calls = calls.sample(fraction=1.0, shuffle=True, seed=7)
    return assign_advantages(calls, facts, pl.DataFrame(past, schema=HISTORY, orient="row"), plan)


def advantages(rollouts: Sequence[Rollout], **settings: Any) -> list[float]:
    """The advantages of all calls, in order."""
    return estimate(rollouts, **settings).calls.sort("rollout", "position")["advantage"].to_list()

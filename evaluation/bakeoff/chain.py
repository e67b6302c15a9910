"""A tabular chain whose values are known exactly: an agent steps to a goal within a number of calls.

In each call the agent steps forward, stays or steps back from a place, from 0. The rollout's reward is 1 if it is at the
goal after the last call; who has reached the goal stays there, so later calls do not matter. A tool call follows each call: it
fails with probability .8 after a step back, else .1, which AIR's rule `tool_error` sees. Two agents make calls in turns.
A call samples one token, its action.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from evaluation.bakeoff.estimators import AIR_RULES
from trainspan_processing.rewards.air import AIR, air_rules
from trainspan_processing.rewards.names import rollout_column, step_column

__all__ = ["ACTIONS", "AGENTS", "Chain", "Played", "frames"]

ACTIONS: Final = 3
MOVES: Final = np.array([1, 0, -1])
FAILS: Final = np.array([0.1, 0.1, 0.8])
AGENTS: Final = ("planner", "worker")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Played:
    """R rollouts of H calls. Calls before `first` are repeated ones of a branch."""

    task: Ints
    """(R,)"""
    first: Ints
    """(R,): the first sampled call."""
    places: Ints
    """(R, H + 1)"""
    actions: Ints
    """(R, H); −1 before `first`."""
    failed: NDArray[np.bool_]
    """(R, H): whether the tool call after a call failed."""
    rewards: Floats
    """(R,)"""

    @property
    def sampled(self) -> int:
        """Tokens that were sampled."""
        return int((self.actions.shape[1] - self.first).sum())


@dataclass(frozen=True, slots=True)
class Chain:
    """The tasks, each with a goal. A policy is an array (tasks, calls, places, actions) of probabilities."""

    calls: int = 8
    goals: tuple[int, ...] = (2, 3, 4, 5)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.goals), self.calls, max(self.goals) + 1, ACTIONS

    def step(self, task: Ints, place: Ints, action: Ints) -> Ints:
        """The places after the actions."""
        goal = np.array(self.goals)[task]
        return np.where(place >= goal, place, np.clip(place + MOVES[action], 0, goal))

    def action_values(self, policy: Floats) -> tuple[Floats, Floats]:
        """Q (tasks, calls, places, actions) and V (tasks, calls + 1, places) of a policy, by dynamic programming."""
        tasks, calls, places, _ = self.shape
        q, v = np.zeros(self.shape), np.zeros((tasks, calls + 1, places))
        task, place = np.arange(tasks)[:, None], np.arange(places)[None, :]
        v[:, calls] = place >= np.array(self.goals)[:, None]
        for call in reversed(range(calls)):
            for action in range(ACTIONS):
                after = self.step(task, place, np.full(place.shape, action))
                q[:, call, :, action] = v[task, call + 1, after]
            v[:, call] = (policy[:, call] * q[:, call]).sum(-1)
        return q, v

    def success(self, policy: Floats) -> float:
        """The probability that a rollout of a random task succeeds."""
        return float(self.action_values(policy)[1][:, 0, 0].mean())

    def play(self, policy: Floats, task: Ints, rng: np.random.Generator, first: Ints, place: Ints) -> Played:
        """Rollouts of these tasks (R,), from the place (R,) before the call `first` (R,) on."""
        count = len(task)
        places = np.repeat(place[:, None], self.calls + 1, axis=1)
        actions = np.full((count, self.calls), -1)
        failed = np.zeros((count, self.calls), bool)
        for call in range(self.calls):
            begun = first <= call
            chances = policy[task, call, places[:, call]].cumsum(-1)
            action = np.minimum((rng.random((count, 1)) > chances).sum(-1), ACTIONS - 1)
            after = self.step(task, places[:, call], action)
            actions[:, call] = np.where(begun, action, -1)
            places[:, call + 1] = np.where(begun, after, places[:, call])
            failed[:, call] = begun & (rng.random(count) < FAILS[action])
        rewards = (places[:, -1] >= np.array(self.goals)[task]).astype(float)
        return Played(task, first, places, actions, failed, rewards)


def frames(
    played: Played, group: Ints, values: Floats, start: int = 0, *, are_branches: bool = False
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The sampled calls and the rollouts, as `assign_advantages` takes them, numbered from `start`.

    `group` (R,) are groups to compare, `values` (R, H) measured values of the states before calls, NaN if there is none.
    Calls also have `task`, `place` and `action`.
    """
    count, calls = played.actions.shape
    number, call = np.repeat(np.arange(count), calls), np.tile(np.arange(calls), count)
    place = played.places[:, :-1].ravel()
    penalty = air_rules(AIR_RULES)["tool_error"]
    found = pl.DataFrame(
        {
            "rollout": number + start,
            "position": call,
            "request": call + 1,
            "agent": np.array(AGENTS)[call % len(AGENTS)],
            "turn": call // len(AGENTS),
            "state": (played.task[number] * calls + call) * 100 + place,
            "state_value": pl.Series(values.ravel()).fill_nan(None),
            step_column("reward"): pl.Series([None] * (count * calls), dtype=pl.Float64),
            rollout_column("reward"): played.rewards[number],
            step_column(AIR): pl.Series(np.where(played.failed.ravel(), penalty, np.nan)).fill_nan(None),
            rollout_column(AIR): pl.Series([None] * (count * calls), dtype=pl.Float64),
            "task": played.task[number],
            "place": place,
            "action": played.actions.ravel(),
        },
        schema_overrides={"rollout": pl.UInt32, "position": pl.UInt32, "request": pl.UInt32, "turn": pl.Int32},
    ).filter(pl.col("action") >= 0)
    rollouts = pl.DataFrame(
        {
            "rollout": np.arange(count) + start,
            "group": group,
            "run_id": ["chain"] * count,
            "judge": None,
            "end_ns": np.arange(count) + start,
            "rollout_id": [f"{start + each:08d}" for each in range(count)],
            "attempt": [0] * count,
            "is_branch": are_branches,
        },
        schema_overrides={"rollout": pl.UInt32, "group": pl.UInt32, "attempt": pl.Int32, "judge": pl.String},
    )
    return found, rollouts

"""Branches on the chain: from the states that `trainspan branch` would choose, with the rewards that measure their values."""

from typing import Final

import numpy as np
import polars as pl

from evaluation.bakeoff.chain import AGENTS, Chain, Floats, Played
from evaluation.bakeoff.estimators import Vine
from trainspan_processing.branches.choice import CallChoice, branch_points
from trainspan_processing.branches.states import STATES
from trainspan_processing.tables import ROLLOUT_KEY

__all__ = ["measured"]

_NO_KNOWN: Final = pl.DataFrame(schema={"rollout_id": pl.String, "attempt": pl.Int32})


def measured(
    chain: Chain, policy: Floats, played: Played, vine: Vine, rng: np.random.Generator
) -> tuple[Floats, Played]:
    """Values (R, H) of the states of whole rollouts, NaN if not measured, and the branches, `m` from each state in turn.

    The first state's value is the group's, as in `trainspan branch`.
    """
    # Whether a call is chosen is a hash of its rollout's id, which no two rounds share.
    salt = int(rng.integers(2**62))
    states = _states(policy, played, salt)
    known = states.select(ROLLOUT_KEY).unique()
    points, _ = branch_points(states, CallChoice.parse(vine.calls), known)
    rollout = points["rollout_id"].str.split("-").list.last().cast(pl.Int64).to_numpy()
    call = points["call"].cast(pl.Int64).to_numpy()
    values = np.full(played.actions.shape, np.nan)
    whole, first = (np.repeat(each, vine.m) for each in (rollout, call))
    branches = chain.play(policy, played.task[whole], rng, first, played.places[whole, first])
    values[rollout, call] = branches.rewards.reshape(len(rollout), vine.m).mean(-1)
    return values, branches


def _states(policy: Floats, played: Played, salt: int) -> pl.DataFrame:
    """STATES of the rollouts, whose ids are `SALT-NUMBER`."""
    count, calls = played.actions.shape
    number, call = np.repeat(np.arange(count), calls), np.tile(np.arange(calls), count)
    chance = policy[played.task[number], call, played.places[:, :-1].ravel(), played.actions.ravel()]
    found = {
        "rollout_id": [f"{salt}-{each}" for each in number],
        "attempt": 0,
        "call": call,
        "trace_id": "",
        "span_id": "",
        "agent": np.array(AGENTS)[call % len(AGENTS)],
        "call_kind": "main",
        "policy_version": 0,
        "surprisal": -np.log(chance),
        "answered_s": 0.0,
        "can_repeat": True,
        "obstacle": None,
    }
    return pl.DataFrame(found).select(pl.col(name).cast(kind) for name, kind in STATES.items())

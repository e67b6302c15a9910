"""The bake-off on the chain: agreement with exact advantages, and learning curves by rounds and by sampled tokens."""

from typing import Final

import numpy as np
import polars as pl

from evaluation.bakeoff.chain import ACTIONS, Chain, Floats, frames
from evaluation.bakeoff.chain_branches import measured
from evaluation.bakeoff.estimators import ESTIMATORS, Estimate, Vine, advantages_of
from evaluation.bakeoff.scores import Agreement, agreement

__all__ = ["EXACT", "GROUPS", "POLICIES", "STEP_KL", "learn", "policy_of", "score"]

GROUP: Final = 8
POLICIES: Final = {"untrained": 0.0, "half trained": 1.0}
"""Name → how much a step forward is preferred, in logits."""
EXACT: Final = "exact"
"""Trains with the exact advantages, at the tokens of `identical`: what perfect credit would give."""
SCORED_GROUPS: Final = 40
GROUPS: Final = 4
"""Groups of a round of learning."""
STEP_KL: Final = 0.01
"""How far a round moves the policy, in nats: the mean over the trained calls of KL(old ‖ new)."""
_BISECTIONS: Final = 30
_LONGEST: Final = 1e9
_TINY: Final = 1e-300


def policy_of(chain: Chain, preference: float) -> Floats:
    """A policy that prefers a step forward in every state."""
    logits = np.zeros(chain.shape)
    logits[..., 0] = preference
    return _softmax(logits)


def score(chain: Chain, name: str, preference: float, seed: int) -> Agreement:
    """Agreement of an estimator's advantages with the exact ones, on `SCORED_GROUPS` groups of rollouts.

    Every estimator sees the same rollouts.
    """
    rng = np.random.default_rng((seed, 1))
    policy = policy_of(chain, preference)
    found, _ = _round(chain, policy, ESTIMATORS[name], SCORED_GROUPS, rng, ESTIMATORS[name].vine)
    found = found.filter("original")
    return agreement(found["advantage"], _exact(chain, policy, found), found["dropped"])


def learn(chain: Chain, name: str, seed: int, budget: int, rounds: int) -> list[tuple[int, float]]:
    """Trains the uniform policy with an estimator; (sampled tokens, exact success) before and after each round.

    A round has `GROUPS` groups, of the tasks in turn, and moves the policy along the mean of advantage · ∇ log π over the
    calls that are not dropped; branches are data, as in the loop. Every round moves it equally far, by `STEP_KL`: only the
    direction depends on the estimator, so there is no learning rate to choose. Ends after at least `rounds` rounds, when a
    round would begin with `budget` tokens sampled.
    """
    rng = np.random.default_rng((seed, 2))
    estimate = ESTIMATORS["identical" if name == EXACT else name]
    logits = np.zeros(chain.shape)
    tokens, curve = 0, [(0, chain.success(_softmax(logits)))]
    while tokens < budget or len(curve) <= rounds:
        policy = _softmax(logits)
        calls, sampled = _round(chain, policy, estimate, GROUPS, rng, estimate.vine, (len(curve) - 1) * GROUPS)
        tokens += sampled
        if name == EXACT:
            calls = calls.with_columns(pl.Series("advantage", _exact(chain, policy, calls)), dropped=False)
        logits = _moved(logits, calls.filter(~pl.col("dropped")))
        curve.append((tokens, chain.success(_softmax(logits))))
    return curve


def _round(
    chain: Chain,
    policy: Floats,
    estimate: Estimate,
    groups: int,
    rng: np.random.Generator,
    vine: Vine | None,
    first_task: int = 0,
) -> tuple[pl.DataFrame, int]:
    """Calls with `advantage`, `dropped` and `original` (not of a branch), and the number of sampled tokens."""
    group = np.repeat(np.arange(groups), GROUP)
    nothing = np.zeros(len(group), int)
    played = chain.play(policy, (first_task + group) % len(chain.goals), rng, nothing, nothing)
    values, sampled = np.full(played.actions.shape, np.nan), played.sampled
    branched = None
    if vine is not None:
        values, branched = measured(chain, policy, played, vine, rng)
        sampled += branched.sampled
    parts = [frames(played, group, values)]
    if branched is not None and vine is not None and vine.m > 1:  # a single branch has nothing to be compared with
        of_state = groups + np.repeat(np.arange(len(branched.task) // vine.m), vine.m)
        unknown = np.full(branched.actions.shape, np.nan)
        parts.append(frames(branched, of_state, unknown, len(group), are_branches=True))
    calls, rollouts = (pl.concat(part) for part in zip(*parts, strict=True))
    found = advantages_of(estimate, calls, rollouts)
    return found.with_columns((pl.col("rollout") < len(group)).alias("original")), sampled


def _exact(chain: Chain, policy: Floats, calls: pl.DataFrame) -> Floats:
    q, v = chain.action_values(policy)
    task, call, place, action = (calls[name].to_numpy() for name in ("task", "position", "place", "action"))
    return np.asarray(q[task, call, place, action] - v[task, call, place])


def _moved(logits: Floats, trained: pl.DataFrame) -> Floats:
    """Logits moved along the gradient of the trained calls by `STEP_KL`; unchanged if there is no gradient."""
    policy, gradient = _softmax(logits), np.zeros(logits.shape)
    task, call, place, action = (trained[name].to_numpy() for name in ("task", "position", "place", "action"))
    states = (task, call, place)
    score = np.eye(ACTIONS)[action] - policy[states]
    np.add.at(gradient, states, trained["advantage"].to_numpy()[:, None] * score)
    if not gradient.any():
        return logits

    def distance(length: float) -> float:
        new = _softmax(logits + length * gradient)[states]
        return float(
            (policy[states] * np.log(np.maximum(policy[states], _TINY) / np.maximum(new, _TINY))).sum(-1).mean()
        )

    least, most = 0.0, 1.0
    while distance(most) < STEP_KL and most < _LONGEST:
        most *= 4
    for _ in range(_BISECTIONS):
        middle = (least + most) / 2
        least, most = (middle, most) if distance(middle) < STEP_KL else (least, middle)
    return logits + least * gradient


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))

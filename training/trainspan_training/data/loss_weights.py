"""Weights of trained tokens in the objective: built-in rules, and custom rules as `module:function`.

A rule takes the calls of one optimizer step and returns a number w ≥ 0 for each; the loss is −Σ_calls w Σ_t f_t, where
f_t is the clipped objective of a token. The weights are used as returned, without further normalization.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from trainspan_schemas.agents.functions import load_function
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import ConfigError, TrainingError

__all__ = ["Rule", "StepCall", "apply", "find_rule"]


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of an optimizer step, as passed to a rule; the calls of a rollout are adjacent."""

    rollout: str
    group: str
    index: int
    """Index of the call in its rollout."""
    tokens: int
    """Number of trained tokens."""
    advantage: float
    policy_version: int | None


Rule = Callable[[Sequence[StepCall]], Sequence[float]]


def find_rule(settings: TrainSettings) -> Rule:
    """The rule named by `weights`. Raises ConfigError, or UsageError if `module:function` cannot be loaded."""
    if settings.weights == "rollout":
        return _rollout_mean
    if settings.weights == "token":
        return _token_mean
    if settings.weights == "const":
        if settings.const_tokens is None:
            raise ConfigError('train.weights = "const" needs train.const_tokens')
        return _constant(settings.const_tokens)
    return load_function(settings.weights)


def apply(rule: Rule, calls: Sequence[StepCall]) -> list[float]:
    """The weights (C,) of the calls. Raises TrainingError if the rule returns invalid weights."""
    weights = [float(weight) for weight in rule(calls)]
    if len(weights) != len(calls):
        raise TrainingError(
            f"train.weights returned {len(weights)} numbers for {len(calls)} calls: it must return one per call"
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise TrainingError(f"train.weights returned {weight}: weights must be finite and not negative")
    return weights


def _rollout_mean(calls: Sequence[StepCall]) -> list[float]:
    """1/(R·N_r): the mean over the R rollouts of the mean over their N_r tokens."""
    tokens = {name: sum(c.tokens for c in of) for name, of in groupby(calls, lambda call: call.rollout)}
    return [1 / (len(tokens) * tokens[call.rollout]) for call in calls]


def _token_mean(calls: Sequence[StepCall]) -> list[float]:
    """1/N: the mean over the tokens."""
    total = sum(call.tokens for call in calls)
    return [1 / total] * len(calls)


def _constant(length: int) -> Rule:
    """1/(R·L): sums over rollouts, divided by a fixed length (Dr. GRPO, arXiv 2503.20783)."""

    def weigh(calls: Sequence[StepCall]) -> list[float]:
        return [1 / (len({call.rollout for call in calls}) * length)] * len(calls)

    return weigh

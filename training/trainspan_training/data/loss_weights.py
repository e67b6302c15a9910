"""Weights of trained tokens in the objective: the built-in rules, and one's own as `module:function`.

A rule is called with the calls of one optimizer step and gives each a number w ≥ 0; the loss is −Σ_calls w Σ_t f_t, where
f_t is the clipped objective of a token. What it returns is used as it is: nothing is normalised afterwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from trainspan_schemas.errors import ConfigError, TrainingError
from trainspan_schemas.functions import load_function
from trainspan_schemas.settings import TrainSettings

__all__ = ["Rule", "StepCall", "apply", "find_rule"]


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of an optimizer step, as a rule sees it; the calls of a rollout stand together."""

    rollout: str
    group: str
    index: int
    """Place of the call in its rollout."""
    tokens: int
    """Tokens that are trained."""
    advantage: float
    policy_version: int | None


Rule = Callable[[Sequence[StepCall]], Sequence[float]]


def find_rule(settings: TrainSettings) -> Rule:
    """The rule that `weights` names. Raises ConfigError, or UsageError where `module:function` cannot be loaded."""
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
    """The weights (C,) of the calls. Raises TrainingError where the rule's answer cannot be meant."""
    weights = [float(weight) for weight in rule(calls)]
    if len(weights) != len(calls):
        raise TrainingError(f"train.weights gave {len(weights)} numbers for {len(calls)} calls: return one for each")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise TrainingError(f"train.weights gave {weight}: weights must be finite and not less than 0")
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

"""Alarms on a round's figures: each has a name, a threshold and advice; none of them ends the round."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainspan_training.metrics.round_record import RoundRecord

__all__ = ["ALARMS", "LEAST_EVIDENCE", "NO_SIGNAL_ADVICE", "SIGNAL_ROUNDS", "Alarm", "raised"]


SIGNAL_ROUNDS = 8
"""Tested rounds after which missing evidence that rewards depend on the answers is an alarm."""
LEAST_EVIDENCE = 1.0
"""Standard deviations that the evidence has to reach in one of the rounds so far."""
NO_SIGNAL_ADVICE = "rewards look independent of the answers: is the judge looking at them?"


@dataclass(frozen=True, slots=True)
class Alarm:
    """Raised if a round's figure is beyond its threshold; an unmeasured figure raises nothing."""

    name: str
    figure: "Callable[[RoundRecord], float]"
    threshold: float
    above: bool
    """Raised above the threshold if true, below it if false."""
    advice: str

    def holds(self, record: "RoundRecord") -> bool:
        value = self.figure(record)
        return value > self.threshold if self.above else value < self.threshold


ALARMS = (
    Alarm(
        "low_effective_sample_size",
        lambda record: record.effective_sample_share,
        0.5,
        False,
        "the data is far from the policy: train on fresher rollouts, or set train.max_staleness",
    ),
    Alarm(
        "many_bounded_weights",
        lambda record: record.bounded,
        0.1,
        True,
        "off-policy weights are cut or masked for many tokens: train on fresher rollouts",
    ),
    Alarm(
        "many_rejected_calls",
        lambda record: record.rejected_calls,
        0.2,
        True,
        "train.reject_ratio leaves little to train on: train on fresher rollouts, or raise it",
    ),
    Alarm(
        "stale_data",
        lambda record: record.staleness_mean,
        4.0,
        True,
        "rollouts are many versions old: train more often, or set train.max_staleness",
    ),
    Alarm(
        "no_signal",
        lambda record: record.signal_best if record.signal_rounds >= SIGNAL_ROUNDS else math.nan,
        LEAST_EVIDENCE,
        False,
        NO_SIGNAL_ADVICE,
    ),
    Alarm(
        "no_observations",
        lambda record: math.nan if record.observation_tokens is None else record.observation_tokens,
        1.0,
        False,
        "train.observation_weight has no effect: nothing stands between two calls of a row or, if unobserved_tokens is not 0, "
        "it is not as the chat template in the model's folder writes it",
    ),
    Alarm(
        "much_clipping",
        lambda record: record.clip_low + record.clip_high,
        0.2,
        True,
        "steps are too large: lower train.learning_rate or train.target_kl",
    ),
    Alarm(
        "large_gradient",
        lambda record: record.grad_norm_max,
        100.0,
        True,
        "look at the advantages and the ratio of this round, and lower train.learning_rate",
    ),
    Alarm(
        "low_entropy",
        lambda record: record.entropy,
        0.02,
        False,
        "the policy hardly explores any more: sample at a higher temperature, or stop",
    ),
    Alarm(
        "much_padding",
        lambda record: record.padding,
        0.5,
        True,
        "lengths differ a lot within a step: use more rollouts per step",
    ),
)
"""All alarms except `engine_mismatch`, which `trainspan_schemas.artifacts.agreement` decides."""


def raised(record: "RoundRecord") -> list[tuple[str, str]]:
    """Name and one line of each alarm that the record raises."""
    lines = [
        (
            alarm.name,
            f"{alarm.figure(record):.3g} is {'above' if alarm.above else 'below'} {alarm.threshold:g}; {alarm.advice}",
        )
        for alarm in ALARMS
        if alarm.holds(record)
    ]
    if record.engine_mismatch:
        lines.insert(
            0,
            (
                "engine_mismatch",
                f"{record.agreement}; the server's log-probabilities are not those of these weights: "
                "look for stale weights, constrained sampling, or rows of another run",
            ),
        )
    return lines

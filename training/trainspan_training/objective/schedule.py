"""The learning rate of each step: a default that fits the model, and warm-up by rounds.

It depends only on the number of updates in Adam's state, so that a restarted trainer resumes at the same point, and warms up
again if it has lost that state.
`TrustRegion` lowers it where a round would move the policy too far.
"""

import math
from dataclasses import dataclass

from trainspan_schemas.config.settings import TrainSettings

__all__ = ["Schedule", "TrustRegion", "fitting_rate"]

_LEAST = 1e-6
"""Full training of large models: DeepSeekMath (7 billion, arXiv 2402.03300) and DAPO (32 billion, arXiv 2503.14476)."""
_SMALL, _SMALL_RATE = 135e6, 2e-5
"""A model size, and a rate that trained it well (docs/decisions/training.md)."""
_ADAPTER = 10
"""An adapter tolerates about ten times the rate of full training (Schulman et al., LoRA Without Regret, 2025)."""
_LEAST_SHARE = 0.1
"""A step that would be shortened to less than this share is not made."""


def fitting_rate(parameters: int, *, adapter: bool) -> float:
    """Rate by number of weights: 2e-5 up to 135 million, 1e-6 from a billion, and in between falling with power 1.5."""
    rate = _SMALL_RATE * min(1.0, (_SMALL / parameters) ** 1.5)
    return float(f"{max(_LEAST, rate) * (_ADAPTER if adapter else 1):.2g}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rises from 0 to `rate` over `warmup` rounds."""

    rate: float
    warmup: float

    @classmethod
    def of(cls, settings: TrainSettings, parameters: int) -> "Schedule":
        """The schedule in the settings; if they give no rate, it fits the model."""
        rate = settings.learning_rate
        if rate is None:
            rate = fitting_rate(parameters, adapter=settings.adapter == "lora")
        return cls(rate, settings.warmup_rounds)

    def at(self, rounds: float) -> float:
        """The rate of a step in the middle of which so many rounds have passed since Adam's state was empty."""
        return self.rate * rounds / self.warmup if rounds < self.warmup else self.rate


class TrustRegion:
    """The rates of one round's steps. `target`: the divergence at which they end (k3, in nats a token); 0: no limit.

    Near its start the divergence grows with the square of the distance, and with Adam the distance grows with the sum of
    the learning rates: k3 after a next step is about k3 · ((d + rate) / d)², where d is the sum of the rates so far. The
    step that would go beyond the target is shortened to reach it, and is the last one. This takes no copy of the weights
    and no forward pass of its own.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._distance = 0.0
        self.reached = False
        """Whether the round's steps end."""

    def limit(self, rate: float, k3: float) -> float:
        """The rate of the next step, at most `rate`, where `k3` was measured right before it; 0 if it must not be made."""
        if self._target and self._distance and k3 > 0:
            room = self._distance * (math.sqrt(self._target / k3) - 1)
            self.reached = room <= rate
            if self.reached:
                rate = room if room >= _LEAST_SHARE * rate else 0.0
        self._distance += rate
        return rate

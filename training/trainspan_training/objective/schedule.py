"""The learning rate of each step: a default that fits the model, warm-up by rounds, and in `sft` by steps, with decay.

It depends only on the number of updates that led to the policy, so that a restarted trainer resumes at the same point.
"""

import math
from dataclasses import dataclass

from trainspan_schemas.config.settings import TrainSettings

__all__ = ["Schedule", "fitting_rate"]

_LEAST = 1e-6
"""Full training of large models: DeepSeekMath (7 billion, arXiv 2402.03300) and DAPO (32 billion, arXiv 2503.14476)."""
_SMALL, _SMALL_RATE = 135e6, 2e-5
"""A model size, and a rate that trained it well (docs/decisions.md)."""
_ADAPTER = 10
"""An adapter tolerates about ten times the rate of full training (Schulman et al., LoRA Without Regret, 2025)."""
_FLOOR = 0.1
"""Share of the rate that remains after decay."""


def fitting_rate(parameters: int, *, adapter: bool) -> float:
    """Rate by number of weights: 2e-5 up to 135 million, 1e-6 from a billion, and in between falling with power 1.5."""
    rate = _SMALL_RATE * min(1.0, (_SMALL / parameters) ** 1.5)
    return float(f"{max(_LEAST, rate) * (_ADAPTER if adapter else 1):.2g}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rises from 0 to `rate` over `warmup` rounds, then falls to a tenth of it until round `end` unless it is constant."""

    rate: float
    warmup: float
    decay: str = "constant"
    end: int = 0

    @classmethod
    def of(cls, settings: TrainSettings, parameters: int) -> "Schedule":
        """The schedule in the settings; if they give no rate, it fits the model."""
        rate = settings.learning_rate
        if rate is None:
            rate = fitting_rate(parameters, adapter=settings.adapter == "lora")
        return cls(rate, settings.warmup_rounds)

    def at(self, rounds: float) -> float:
        """The rate of a step that ends this number of rounds after version 0."""
        if rounds < self.warmup:
            return self.rate * rounds / self.warmup
        if self.decay == "constant":
            return self.rate
        done = min(1.0, (rounds - self.warmup) / (self.end - self.warmup))
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.rate * (_FLOOR + (1 - _FLOOR) * left)

"""Limits how far the steps of a round move the policy, by the divergence that each step measures before it.

Near its start the divergence grows with the square of the distance, and with Adam the distance grows with the sum of
the learning rates. So k3 after a next step is about k3 · ((d + rate) / d)², where d is the sum of the rates so far. The
step that would go beyond the target is shortened to reach it, and is the last one. This takes no copy of the weights
and no forward pass of its own.
"""

import math

__all__ = ["TrustRegion"]

_LEAST_SHARE = 0.1
"""A step that would be shortened to less than this share is not made."""


class TrustRegion:
    """The rates of one round's steps. `target`: the divergence at which they end (k3, in nats a token); 0: no limit."""

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

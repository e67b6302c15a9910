"""Confidence intervals of success rates."""

import math
from dataclasses import dataclass

__all__ = ["Rate"]

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Rate:
    """`successes` of `n` trials."""

    successes: float
    n: int

    @property
    def value(self) -> float:
        return self.successes / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson score interval at 95 % (Wilson 1927); (0, 1) without trials."""
        if not self.n:
            return 0.0, 1.0
        p, n, z2 = self.value, self.n, Z_95**2
        centre = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"

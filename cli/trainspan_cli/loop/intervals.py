"""Confidence intervals: of a success rate, and of a mean over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Rate", "t_interval"]

Z_95 = 1.959964
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's t at 97.5 % for 1 to 9 degrees of freedom; beyond, by the expansion of Cornish and Fisher around Z_95."""


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


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of independent values (Student 1908); None for fewer than two."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    z = Z_95
    beyond = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t = T_95[degrees - 1] if degrees <= len(T_95) else beyond
    mean, half = statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half

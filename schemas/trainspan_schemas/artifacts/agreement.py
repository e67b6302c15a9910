"""Agreement of a server's log-probabilities with those of the trainer's weights, with limits by their dtypes.

Trainer and loop apply the same limits. Over the trained tokens of a round's first step, before any weight is updated, two
figures are compared with them: the mean |Δ log-probability|, and k3, which outlier tokens dominate.
"""

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["LIMITS", "Agreement", "is_exact", "limit_of"]

LIMITS: Final = {"float32": 3e-5, "bfloat16": 0.1}
"""Maximum mean |Δ| by the coarser of the two dtypes; float16 counts as bfloat16. Measured: see docs/decisions.md."""


def is_exact(server: str | None, trainer: str) -> bool:
    """Whether both compute in float32; a server of unknown dtype (None) is assumed to use the trainer's."""
    return {server or trainer, trainer} == {"float32"}


def limit_of(server: str | None, trainer: str, chosen: float | None) -> float:
    """The maximum mean |Δ| that counts as agreement: `chosen` by the user, or the default for the dtypes."""
    return chosen if chosen is not None else LIMITS["float32" if is_exact(server, trainer) else "bfloat16"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of server and trainer in one round. Figures that were not measured are None or NaN."""

    mean: float | None
    """Mean |Δ log-probability| over tokens."""
    k3: float | None
    limit: float
    """Limit of the mean."""
    fresh: bool
    """Whether all calls were sampled by the weights that the round starts from; otherwise no verdict is possible."""
    server_dtype: str | None
    trainer_dtype: str

    @property
    def k3_limit(self) -> float:
        """Limit of k3: for noise of uniform width, k3 is about the square of the mean |Δ|."""
        return self.limit**2

    @property
    def mismatch(self) -> bool:
        """Whether the two disagree on fresh data; true also if nothing was measured."""
        return self.fresh and not (_within(self.mean, self.limit) and _within(self.k3, self.k3_limit))

    def __str__(self) -> str:
        if self.mean is None or self.k3 is None:
            return "not measured"
        what = f"mean |Δlogp| {self.mean:.2g} (limit {self.limit:.0e}), k3 {self.k3:.2g} (limit {self.k3_limit:.0e})"
        where = f"server {self.server_dtype or 'unknown'}, trainer {self.trainer_dtype}"
        return f"{what}, {where}" if self.fresh else f"{what}, not judged: calls of several versions; {where}"


def _within(value: float | None, limit: float) -> bool:
    return value is not None and math.isfinite(value) and value <= limit

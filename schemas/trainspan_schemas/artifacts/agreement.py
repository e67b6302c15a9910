"""Agreement of a server's log-probabilities with those of the trainer's weights, with limits by their dtypes.

Trainer and loop apply the same limits. Over the trained tokens of a round's first step, before any weight is updated, two
figures are compared with them: the mean |Δ log-probability|, and k3, which outlier tokens dominate. Calls of earlier versions
also differ by the policy's own movement, which the trainer measures at the end of every round: their limit is wider by it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["LIMITS", "Agreement", "applied_limit", "is_exact", "limit_of"]

LIMITS: Final = {"float32": 3e-5, "bfloat16": 0.1}
"""Maximum mean |Δ| by the coarser of the two dtypes; float16 counts as bfloat16. Measured: see docs/decisions/training.md."""
MOVEMENT_SLACK: Final = 8.0
"""Factor by which calls of earlier versions may differ more than the policy moved on a sample of each round's tokens."""


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
    """Whether all calls were sampled by the weights that the round starts from."""
    server_dtype: str | None
    trainer_dtype: str
    moved: float | None = None
    """If the calls are of earlier versions: mean |Δ| by which the policy differs at most from one of them, as the trainer
    measured it update by update. None if that is unknown; no verdict is then possible."""

    @property
    def k3_limit(self) -> float:
        """Limit of k3: for noise of uniform width, k3 is about the square of the mean |Δ|."""
        return self.limit**2

    @property
    def stale_limit(self) -> float | None:
        """Limit of the mean for calls of earlier versions, whose k3 outlier tokens dominate; None if it is unknown."""
        return None if self.moved is None else self.limit + MOVEMENT_SLACK * self.moved

    @property
    def mismatch(self) -> bool:
        """Whether the two disagree; true also if nothing was measured on fresh data."""
        if self.fresh:
            return not (_within(self.mean, self.limit) and _within(self.k3, self.k3_limit))
        return self.stale_limit is not None and not _within(self.mean, self.stale_limit)

    def __str__(self) -> str:
        if self.mean is None or self.k3 is None:
            return "not measured"
        where = f"server {self.server_dtype or 'unknown'}, trainer {self.trainer_dtype}"
        if self.fresh:
            what = (
                f"mean |Δlogp| {self.mean:.2g} (limit {self.limit:.0e}), k3 {self.k3:.2g} (limit {self.k3_limit:.0e})"
            )
            return f"{what}, {where}"
        if self.stale_limit is None:
            return f"mean |Δlogp| {self.mean:.2g}, not judged: calls of earlier versions; {where}"
        limit = f"limit {self.stale_limit:.2g}: the policy moved by {self.moved:.2g} since these calls"
        return f"mean |Δlogp| {self.mean:.2g} ({limit}), {where}"


def applied_limit(reported: Mapping[str, Any]) -> float | None:
    """The limit of the mean in a round's record of its `Agreement`; None if the round was not judged."""
    fields = {"mean": None, "k3": None, "server_dtype": None, "trainer_dtype": "", **reported}
    agreement = Agreement(**fields)
    return agreement.limit if agreement.fresh else agreement.stale_limit


def _within(value: float | None, limit: float) -> bool:
    return value is not None and math.isfinite(value) and value <= limit

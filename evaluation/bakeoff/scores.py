"""How well estimated advantages agree with true ones."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Agreement", "agreement"]

_ZERO: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement over the calls of one set of rollouts; NaN if it is not defined."""

    sign: float
    """Share of the calls with a true advantage other than 0 whose estimate has its sign; an estimate of 0 counts half."""
    correlation: float
    """Pearson's, over all calls; an estimator without any spread has 0."""
    dropped: float
    """Share of the calls that the estimator says nothing about; their estimate is 0."""
    calls: int

    def record(self) -> dict[str, Any]:
        return asdict(self)


def agreement(estimated: ArrayLike, true: ArrayLike, dropped: ArrayLike) -> Agreement:
    """Agreement of estimated (C,) and true (C,) advantages; `dropped` (C,) marks calls without an estimate."""
    found, exact = np.asarray(estimated, float), np.asarray(true, float)
    matters = np.abs(exact) > _ZERO
    signs = np.where(np.abs(found) > _ZERO, np.sign(found), 0.0)[matters] * np.sign(exact[matters])
    sign = float(np.mean((signs + 1) / 2)) if matters.any() else float("nan")
    share = float(np.mean(np.asarray(dropped, float))) if len(exact) else float("nan")
    return Agreement(sign, _correlation(found, exact), share, len(exact))


def _correlation(found: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    if len(exact) < 2 or np.ptp(exact) < _ZERO:
        return float("nan")
    return float(np.corrcoef(found, exact)[0, 1]) if np.ptp(found) > _ZERO else 0.0

"""Corrections for tokens sampled by a policy other than the one being trained.

With π_old, the policy at the round's start, recomputed: a token has weight w = π_old/π_sampler, bounded, in addition to
its importance ratio π_θ/π_old, so that the expectation is that of the old policy up to the bound (truncated importance
sampling, arXiv 2112.10400 and its use for sampler mismatch, arXiv 2510.26788).
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.micro_batches import MicroBatch

__all__ = ["Correction", "OffPolicySums", "correct"]


@dataclass(frozen=True, slots=True)
class Correction:
    """The rule for weighting tokens by w."""

    kind: str = "truncate"
    """`truncate`: min(w, cap); `mask`: w within 1/cap … cap, else 0; `none`: 1."""
    cap: float = 2.0
    reject_ratio: float | None = None
    """A call gets weight 0 if its geometric mean of w is outside 1/x … x."""
    per_call: bool = False
    """Whether w is the geometric mean over a call, like the importance ratio in that case."""

    @classmethod
    def of(cls, settings: TrainSettings) -> "Correction":
        return cls(
            settings.correction or "truncate",
            settings.correction_cap or 2.0,
            settings.reject_ratio,
            per_call=settings.ratio == "call",
        )


@dataclass(frozen=True, slots=True)
class OffPolicySums:
    """Sums over recomputed tokens, before any bound. Adding them is exact."""

    tokens: float = 0.0
    weight: float = 0.0
    """Σ w"""
    weight_squared: float = 0.0
    bounded: float = 0.0
    """Number of tokens with w cut to the cap, or masked."""
    rejected: float = 0.0
    """Number of tokens in rejected calls."""
    calls: float = 0.0
    rejected_calls: float = 0.0
    max_weight: float = 0.0

    def __add__(self, other: "OffPolicySums") -> "OffPolicySums":
        names = [field.name for field in fields(self)]
        values = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return OffPolicySums(**{n: max(v) if n.startswith("max_") else sum(v) for n, v in values.items()})

    @property
    def effective_share(self) -> float:
        """Effective sample size (Σw)²/Σw² per token: 1 if all weights are equal."""
        return self.weight**2 / (self.weight_squared * self.tokens) if self.tokens else 1.0


def correct(batch: MicroBatch, old: NDArray[np.float64], correction: Correction) -> tuple[MicroBatch, OffPolicySums]:
    """Returns the micro-batch with its ratio against `old` (N,) and corrected advantages, and the measured sums.

    Weights of the objective are unchanged: a masked or rejected token still counts, but contributes nothing.
    """
    log_w = old - batch.sampled
    calls, call_index = np.unique(batch.calls, return_inverse=True)
    mean_C = np.bincount(call_index, log_w, len(calls)) / np.bincount(call_index, minlength=len(calls))
    w = np.exp(mean_C[call_index] if correction.per_call else log_w)
    if correction.kind == "truncate":
        bounded = w > correction.cap
        factor = np.minimum(w, correction.cap)
    elif correction.kind == "mask":
        bounded = (w > correction.cap) | (w < 1 / correction.cap)
        factor = np.where(bounded, 0.0, w)
    else:
        bounded, factor = np.zeros(len(w), dtype=np.bool_), np.ones(len(w))
    limit = np.inf if correction.reject_ratio is None else np.log(correction.reject_ratio)
    rejected_C = np.abs(mean_C) > limit
    rejected = rejected_C[call_index]
    sums = OffPolicySums(
        tokens=float(len(w)),
        weight=float(w.sum()),
        weight_squared=float((w**2).sum()),
        bounded=float(bounded.sum()),
        rejected=float(rejected.sum()),
        calls=float(len(calls)),
        rejected_calls=float(rejected_C.sum()),
        max_weight=float(w.max(initial=0.0)),
    )
    factor = np.where(rejected, 0.0, factor)
    return replace(batch, old=old, advantages=batch.advantages * factor), sums

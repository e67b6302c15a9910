"""Exact sums over the trained tokens of optimizer steps, on the device until a step is over."""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

__all__ = ["StepStats", "TokenSums"]


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Over trained tokens, with d = log π_θ − log π_sampled and the ratio ρ = exp d. Adding up is exact."""

    tokens: float = 0.0
    abs_diff: float = 0.0
    """Σ |d|"""
    k1: float = 0.0
    """Σ −d: with its expectation KL(π_sampled ‖ π_θ)."""
    k3: float = 0.0
    """Σ (ρ − 1 − d): the same expectation, never negative (Schulman, "Approximating KL divergence")."""
    clipped_low: float = 0.0
    """Tokens whose ratio is below the clip with a negative advantage: they give no gradient."""
    clipped_high: float = 0.0
    entropy: float = 0.0
    max_abs_diff: float = 0.0
    max_ratio: float = 0.0

    def __add__(self, other: "TokenSums") -> "TokenSums":
        names = [field.name for field in fields(self)]
        combine = {name: (max if name.startswith("max_") else sum) for name in names}
        return TokenSums(**{name: combine[name]([getattr(self, name), getattr(other, name)]) for name in names})

    def mean(self, name: str) -> float:
        """The sum `name` per trained token; NaN without tokens."""
        return float(getattr(self, name)) / self.tokens if self.tokens else math.nan

    @classmethod
    @torch.no_grad()
    def measure(
        cls, logprobs: Tensor, sampled: Tensor, advantages: Tensor, entropies: Tensor, clip: tuple[float, float]
    ) -> Tensor:
        """The sums of one micro-batch of N tokens as a tensor, so that no device is waited for; see `collect`.

        All arguments (N,), but `clip`: the ratios beyond which the loss clips.
        """
        low, high = clip
        diff = logprobs.double() - sampled.double()
        ratio = diff.exp()
        return torch.stack(
            [
                torch.full_like(diff, 1.0).sum(),
                diff.abs().sum(),
                -diff.sum(),
                (ratio - 1 - diff).sum(),
                ((ratio < low) & (advantages < 0)).sum().double(),
                ((ratio > high) & (advantages > 0)).sum().double(),
                entropies.double().sum(),
                diff.abs().max(),
                ratio.max(),
            ]
        )

    @classmethod
    def collect(cls, measured: list[Tensor]) -> "TokenSums":
        """The sums of several micro-batches."""
        total = cls()
        for values in torch.stack(measured).tolist() if measured else []:
            total += cls(*values)
        return total


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step measured before it moved the weights."""

    sums: TokenSums
    loss: float
    grad_norm: float
    """Before clipping."""

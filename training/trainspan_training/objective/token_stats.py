"""Exact sums over the trained tokens of optimizer steps, kept on the device until a step ends; limits on a step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainspan_schemas.config.settings import TrainSettings

__all__ = ["StepStats", "TokenSums", "call_means", "clip_sides", "fault_of", "importance_ratios", "kl_fault"]


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over trained tokens, with d = log π_θ − log π_other and its ratio ρ = exp d. Adding them is exact.

    The sampler is the policy that sampled a token; the old policy is the denominator of the loss's importance ratio.
    """

    tokens: float = 0.0
    free: float = 0.0
    """Number of tokens that had an alternative. The others add 0 to every sum."""
    abs_diff: float = 0.0
    """Σ |d| against the sampler."""
    k1: float = 0.0
    """Σ −d against the sampler: its expectation is KL(π_sampler ‖ π_θ)."""
    k3: float = 0.0
    """Σ (ρ − 1 − d) against the sampler: the same expectation, never negative (Schulman, "Approximating KL divergence")."""
    k3_old: float = 0.0
    """k3 against the old policy."""
    k3_reference: float = 0.0
    """Σ (1/ρ − 1 + d) against the reference: its expectation is KL(π_θ ‖ π_reference) for tokens of π_θ."""
    clipped_low: float = 0.0
    """Number of tokens with a ratio below the clip and a negative advantage: they give no gradient."""
    clipped_high: float = 0.0
    entropy: float = 0.0
    max_abs_diff: float = 0.0
    """Against the sampler."""
    max_ratio: float = 0.0
    """Greatest per-token importance ratio."""
    observations: float = 0.0
    """Number of observation tokens that were scored."""
    observation_nats: float = 0.0
    """Σ −log π_θ of these tokens, which are in none of the sums above."""

    def __add__(self, other: "TokenSums") -> "TokenSums":
        names = [field.name for field in fields(self)]
        combine = {name: (max if name.startswith("max_") else sum) for name in names}
        return TokenSums(**{name: combine[name]([getattr(self, name), getattr(other, name)]) for name in names})

    def mean(self, name: str) -> float:
        """The sum `name` per trained token that had an alternative; 0 if none had one, NaN without tokens."""
        return float(getattr(self, name)) / (self.free or self.tokens) if self.tokens else math.nan

    @classmethod
    @torch.no_grad()
    def measure(
        cls,
        logprobs: Tensor,
        entropies: Tensor,
        *,
        sampled: Tensor,
        old: Tensor,
        reference: Tensor | None,
        advantages: Tensor,
        calls: Tensor | None,
        forced: Tensor | None = None,
        clip: tuple[float, float],
        observed: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The sums of one micro-batch of N tokens as a tensor, which avoids a device synchronization; see `collect`.

        All arguments are (N,), except `observed`, the log-probabilities (M,) of its observation tokens and how often each
        counts, and `clip`: the ratios beyond which the loss clips. `calls` are given if the ratio is
        that of a whole call. `forced` is true for tokens without an alternative.
        """
        if not len(logprobs):
            return torch.zeros(len(fields(cls)), dtype=torch.float64, device=logprobs.device)
        now = logprobs.double()
        diff, moved = now - sampled, now - old
        sides = clip_sides(importance_ratios(now, old, calls), advantages, forced, clip)
        apart = torch.zeros_like(diff) if reference is None else now - reference
        free = torch.ones_like(diff, dtype=torch.bool) if forced is None else ~forced
        seen, counts = (each.double() for each in observed or (now[:0], now[:0]))
        return torch.stack(
            [
                torch.full_like(diff, 1.0).sum(),
                free.sum().double(),
                diff.abs().sum(),
                -diff.sum(),
                (diff.exp() - 1 - diff).sum(),
                (moved.exp() - 1 - moved).sum(),
                ((-apart).exp() - 1 + apart).sum(),
                (sides < 0).sum().double(),
                (sides > 0).sum().double(),
                entropies.double().sum(),
                diff.abs().max(),
                moved.exp().max(),
                counts.sum(),
                -(counts * seen).sum(),
            ]
        )

    @classmethod
    def collect(cls, measured: Iterable[Tensor]) -> "TokenSums":
        """The sums of several micro-batches."""
        total = cls()
        for values in [each.tolist() for each in measured]:
            total += cls(*values)
        return total


@dataclass(frozen=True, slots=True)
class StepStats:
    """Measurements of one optimizer step, before the weights changed."""

    sums: TokenSums
    loss: float
    grad_norm: float
    """Before clipping."""
    rate: float
    """Learning rate; 0 if the step was only measured, because the round had reached `target_kl`."""
    seconds: float
    """Time of forward and backward passes and clipping."""


def importance_ratios(logprobs: Tensor, old: Tensor, calls: Tensor | None) -> Tensor:
    """π_θ/π_old of each token (N,) in float64, or the geometric mean over its call if `calls` (N,) are given."""
    moved = logprobs.double() - old
    return (moved if calls is None else call_means(moved, calls)).exp()


def clip_sides(ratios: Tensor, advantages: Tensor, forced: Tensor | None, clip: tuple[float, float]) -> Tensor:
    """(N,) int8: −1 for a token below the clip with a negative advantage, 1 above it with a positive one, else 0.

    The loss gives these tokens no gradient, or caps their ratio. A token without an alternative (`forced`) is 0.
    """
    low, high = clip
    above = ((ratios > high) & (advantages > 0)).to(torch.int8)
    below = ((ratios < low) & (advantages < 0)).to(torch.int8)
    return above - below if forced is None else (above - below).masked_fill(forced, 0)


def call_means(values: Tensor, calls: Tensor) -> Tensor:
    """Replaces each of the values (N,) by the mean over the tokens of its call; `calls` (N,) are call ids."""
    call_index: Tensor = calls.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    counts = torch.zeros(int(call_index.max()) + 1 if len(call_index) else 0, dtype=values.dtype, device=values.device)
    sums = counts.index_add(0, call_index, values)
    counts = counts.index_add(0, call_index, torch.ones_like(values))
    return (sums / counts)[call_index]


def fault_of(stats: StepStats, limits: TrainSettings, *, fresh: bool) -> str | None:
    """Why a step must not be applied, or None. `fresh`: its calls were sampled by the round's starting weights."""
    if not math.isfinite(stats.loss):
        return f"the loss is {stats.loss}"
    if not math.isfinite(stats.grad_norm):
        return f"the gradient norm is {stats.grad_norm}"
    if (fault := kl_fault(stats.sums, limits, fresh=fresh)) is not None:
        return fault
    if stats.sums.max_ratio > limits.max_ratio:
        return f"an importance ratio is {stats.sums.max_ratio:.3g}, above max_ratio {limits.max_ratio:g}"
    return None


def kl_fault(sums: TokenSums, limits: TrainSettings, *, fresh: bool) -> str | None:
    """Why the policy is too far from the sampling or old policy, or None."""
    others = {"k3": "the sampling policy"} if fresh else {}
    for name, of in (others | {"k3_old": "the old policy"}).items():
        if not (k3 := sums.mean(name)) <= limits.max_kl:
            return f"the KL divergence from {of} is {k3:.3g}, above max_kl {limits.max_kl:g}"
    return None

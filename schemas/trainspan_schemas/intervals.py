"""Confidence intervals: of a success rate, a mean of independent values, a correlation, and Cohen's kappa."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

__all__ = [
    "MOST_LEFT_OUT",
    "Z_95",
    "EstimateRecord",
    "RewardEstimate",
    "correlation_interval",
    "kappa",
    "kappa_interval",
    "measured",
    "ratio_interval",
    "share_interval",
    "t_half_width",
    "t_interval",
]

Z_95 = 1.959964
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's t at 97.5 % for 1 to 9 degrees of freedom; above 9, the Cornish-Fisher expansion around Z_95 is used."""

MOST_LEFT_OUT = 0.1
"""The largest share of rollouts without a reward at which the mean of the others says much."""


class EstimateRecord(TypedDict):
    """A `RewardEstimate` in JSON: values that are not finite are null."""

    n: int
    mean: float | None
    deviation: float | None
    binary: bool
    n_rollouts: int
    left_out: int


@dataclass(frozen=True, slots=True)
class RewardEstimate:
    """Mean reward over tasks. Rollouts of one task are not independent trials, so each task counts once, with its mean."""

    n: int
    """Tasks that have a reward."""
    mean: float
    """NaN without tasks."""
    deviation: float
    """Sample standard deviation over tasks; NaN for fewer than two, or if a reward is not finite."""
    binary: bool
    """Whether every reward is 0 or 1, so that the mean is a success rate."""
    n_rollouts: int = 0
    """All rollouts of the tasks; 0 if unknown."""
    left_out: int = 0
    """Those without a reward, which the mean says nothing about: if they failed, it is too high."""

    @classmethod
    def of(cls, tasks: Iterable[Sequence[float | None]]) -> "RewardEstimate":
        """Estimates from the rewards of each task's rollouts, None for a rollout without one; such do not count."""
        rollouts = [list(rewards) for rewards in tasks]
        scored = [[reward for reward in rewards if reward is not None] for rewards in rollouts]
        total = sum(map(len, rollouts))
        left_out = total - sum(map(len, scored))
        scored = list(filter(None, scored))
        # `statistics` adds exactly: the mean of equal floats is that float, and large values do not overflow.
        means = [statistics.mean(rewards) for rewards in scored]
        spread = len(means) > 1 and all(map(math.isfinite, means))
        return cls(
            n=len(means),
            mean=statistics.mean(means) if means else math.nan,
            deviation=statistics.stdev(means) if spread else math.nan,
            binary=all(reward in (0, 1) for rewards in scored for reward in rewards),
            n_rollouts=total,
            left_out=left_out,
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "RewardEstimate":
        """Reads a record that includes the fields of `record()`; one of an earlier version may lack the last two."""
        mean, deviation = (math.nan if record[name] is None else record[name] for name in ("mean", "deviation"))
        more = {name: record.get(name, 0) for name in ("n_rollouts", "left_out")}
        return cls(record["n"], mean, deviation, record["binary"], **more)

    def record(self) -> EstimateRecord:
        """The JSON fields."""
        mean, deviation = (value if math.isfinite(value) else None for value in (self.mean, self.deviation))
        return EstimateRecord(
            n=self.n,
            mean=mean,
            deviation=deviation,
            binary=self.binary,
            n_rollouts=self.n_rollouts,
            left_out=self.left_out,
        )

    @property
    def stands(self) -> bool:
        """Whether a version may be judged by the mean: no version gains by losing rollouts."""
        return bool(self.n) and self.left_out <= MOST_LEFT_OUT * self.n_rollouts

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval: Wilson's (1927) for a success rate, else Student's (1908).

        None if there are too few tasks, or if all have one reward that is neither 0 nor 1: its spread is unknown, not 0.
        """
        if not self.n:
            return None
        if self.binary:
            return _wilson(self.mean, self.n)
        if math.isnan(self.deviation) or self.deviation == 0:
            return None
        half = t_half_width(self.deviation, self.n)
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        left_out = f", {self.left_out} of {self.n_rollouts} rollouts left out" if self.left_out else ""
        if not self.n:
            return f"no reward{left_out}"
        interval = self.interval
        return f"{self.mean:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "") + left_out


def measured(estimates: Iterable[RewardEstimate]) -> str:
    """The measured quantity: "success" if all rewards are 0 or 1, else "reward"."""
    return "success" if all(estimate.binary for estimate in estimates) else "reward"


def ratio_interval(of: RewardEstimate, to: RewardEstimate) -> tuple[float, float | None] | None:
    """The 95 % interval of `of.mean / to.mean`, from the intervals of both means (MOVER, Donner and Zou 2012, section 3).

    It takes them as independent, so it is too wide for means over the same tasks. The upper end is None if `to` may be 0.
    None if one of the means has no interval, or is negative, or `to` is 0.
    """
    if of.interval is None or to.interval is None or of.mean < 0 or to.mean <= 0:
        return None
    (low, high), (to_low, to_high) = of.interval, to.interval
    product = of.mean * to.mean
    low, to_low = max(0.0, low), max(0.0, to_low)
    below = low * (2 * of.mean - low)
    root = math.sqrt(max(0.0, product**2 - below * to_high * (2 * to.mean - to_high)))
    least = below / (product + root) if below else 0.0
    if to_low == 0:
        return least, None
    above = to_low * (2 * to.mean - to_low)
    root = math.sqrt(max(0.0, product**2 - high * (2 * of.mean - high) * above))
    return least, (product + root) / above


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of independent values (Student 1908); None if all are one: their spread is unknown, not 0."""
    if len(values) < 2 or max(values) - min(values) <= 1e-12 * max(
        map(abs, values)
    ):  # differences of equal means differ by rounding
        return None
    mean, half = statistics.mean(values), t_half_width(statistics.stdev(values), len(values))
    return mean - half, mean + half


def t_half_width(deviation: float, n: int) -> float:
    """The half width of Student's 95 % interval for the mean of `n` values, n ≥ 2, with this sample standard deviation."""
    degrees, z = n - 1, Z_95
    beyond = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t = T_95[degrees - 1] if degrees <= len(T_95) else beyond
    return t * deviation / math.sqrt(n)


def share_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval (1927) of a share of `n` independent trials, n ≥ 1."""
    return _wilson(successes / n, n)


def correlation_interval(correlation: float, n: int) -> tuple[float, float] | None:
    """The 95 % interval of Spearman's rank correlation of `n` pairs (Fieller, Hartley and Pearson 1957); None for fewer than four."""
    if n < 4:
        return None
    bounded = max(-1 + 1e-12, min(1 - 1e-12, correlation))
    half = Z_95 * math.sqrt(1.06 / (n - 3))
    return math.tanh(math.atanh(bounded) - half), math.tanh(math.atanh(bounded) + half)


_EQUAL = 1e-9
"""Two kappas that differ by less are equal but for rounding."""
Table = tuple[float, float, float, float]
"""Two raters' verdicts: weights of both pass, only the first, only the second, neither."""


def kappa(table: Table) -> float | None:
    """Cohen's kappa (1960); None if the expected agreement is 1, as when both raters always pass."""
    both, first, second, neither = table
    total = both + first + second + neither
    if not total:
        return None
    chance = ((both + first) * (both + second) + (second + neither) * (first + neither)) / total**2
    return None if chance > 1 - 1e-12 else ((both + neither) / total - chance) / (1 - chance)


def kappa_interval(tables: Sequence[Table]) -> tuple[float, float] | None:
    """The 95 % interval of the kappa of the sum of independent tables, one for each task, by the jackknife (Tukey 1958).

    None for fewer than two tables, if leaving one out leaves no kappa, or if it never changes kappa: the spread is unknown, not 0.
    """
    total = tuple(map(sum, zip(*tables, strict=True)))
    whole = kappa((total[0], total[1], total[2], total[3])) if tables else None
    rest = [kappa((*(all_ - one for all_, one in zip(total, table, strict=True)),)) for table in tables]  # type: ignore[arg-type]
    if whole is None or len(rest) < 2 or any(value is None for value in rest):
        return None
    n = len(rest)
    pseudo = [n * whole - (n - 1) * value for value in rest if value is not None]
    if max(pseudo) - min(pseudo) < _EQUAL:
        return None
    half = t_half_width(statistics.stdev(pseudo), n)
    return max(-1.0, whole - half), min(1.0, whole + half)


def _wilson(p: float, n: int) -> tuple[float, float]:
    z2 = Z_95**2
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # The interval contains p: exactly 0 of p = 0 and 1 of p = 1, whatever the rounding.
    return max(0.0, min(p, center - half)), min(1.0, max(p, center + half))

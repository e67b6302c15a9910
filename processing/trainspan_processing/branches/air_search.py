"""Searches rules of automatic intermediate rewarding whose occurrences agree with measured advantages. Frames in, frame out.

A rule is chosen on one half of the tasks and tested on the other. The test flips the signs of tasks' contributions to the
covariance of occurrences and advantages (the wild cluster bootstrap of scores, Kline and Santos 2012), because calls of one
rollout are not independent, nor are rollouts of one task: their outputs have the same words, and their first states one value.
Holm's (1979) correction bounds the chance of any false rule in a search by `LEVEL`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_schemas.intervals import t_half_width

__all__ = ["LEVEL", "Proposal", "RuleSearch", "search_rules"]

LEVEL: Final = 0.05
"""Chance that a search on data without signal proposes a rule, at most."""
LEAST_TASKS: Final = 8
"""Tasks of each half in which a rule must occur, and not occur in some call."""
PROMISING: Final = 0.1
"""Greatest p-value in the first half of a rule that is tested in the second."""
MOST_TESTED: Final = 10
"""Rules that are tested in the second half, those of the least p-values in the first."""
SAME: Final = 0.5
"""Share of common calls, of the calls of either, from which on the weaker of two rules says nothing new."""
FLIPS: Final = 9999
_BLOCK: Final = 512
"""Sign flips at a time."""
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A rule, and how it agrees with the advantages."""

    rule: str
    calls: int
    """Calls of both halves at which it occurs."""
    effect: float
    """Mean advantage of the calls of both halves at which it occurs, less that of the others."""
    interval: tuple[float, float]
    """Of the effect, 95 %, by tasks (Student's, with the sandwich of Liang and Zeger 1986)."""
    score: float
    """The effect, shrunk as Stein's positive part: of rules that are proposed because their effect is great, it is too great."""
    p: float
    """Of the held-out half, corrected for the number of rules that were tested there."""
    correlation: float
    """Of occurrences and advantages, in the held-out half."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RuleSearch:
    """The result of a search."""

    proposals: tuple[Proposal, ...]
    """By correlation, the strongest first."""
    rules: int
    """Rules that occur often enough to be examined."""
    tested: int
    """Rules that the first half suggested."""
    calls: int
    rollouts: int
    tasks: int

    @property
    def setting(self) -> str | None:
        """The proposals as `--air`; None without any."""
        return ",".join(f"{one.rule}={one.score:.2g}" for one in self.proposals) or None

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "air": self.setting}


def search_rules(calls: pl.DataFrame, occurrences: pl.DataFrame, *, seed: int = 0) -> RuleSearch:
    """The rules that agree with `advantage`.

    `calls` have rollout_id, attempt, trace_id, span_id, task_id and a measured `advantage`; `occurrences` have `rule`,
    trace_id and span_id of the call. Halves are drawn by a hash of tasks; a rollout without a task is one of its own.
    """
    task = pl.coalesce(pl.format("task {}", "task_id"), pl.format("rollout {}/{}", *ROLLOUT_KEY)).alias("task")
    ordered = calls.sort(*ROLLOUT_KEY, *SPAN_KEY).with_columns(task)
    ordered = ordered.with_columns(_half(ordered, seed).alias("held_out"))
    halves = [_Half.of(ordered.filter(held_out)) for held_out in (pl.col("held_out").not_(), pl.col("held_out"))]
    together = _Half.of(ordered)
    found = occurrences.unique(["rule", *SPAN_KEY]).join(ordered.select(SPAN_KEY), on=SPAN_KEY, how="semi")
    rules = {str(rule): own for (rule,), own in sorted(found.partition_by("rule", as_dict=True).items())}
    marks = {rule: [half.mark(own) for half in halves] for rule, own in rules.items()}
    examined = {rule: pair for rule, pair in marks.items() if all(map(_Half.is_enough, halves, pair))}
    first_p = halves[0].p_values({rule: pair[0] for rule, pair in examined.items()}, seed)
    ranked = sorted((p, rule) for rule, p in first_p.items() if p <= PROMISING)
    promising = {rule: examined[rule] for _, rule in ranked[:MOST_TESTED]}
    p_values = halves[1].p_values({rule: pair[1] for rule, pair in promising.items()}, seed)
    proposals = []
    for rule, p in _holm(p_values).items():
        first, second = (half.effect(mark) for half, mark in zip(halves, promising[rule], strict=True))
        if p <= LEVEL and first * second > 0:
            correlation = halves[1].correlation(promising[rule][1])
            effect, interval, score = together.estimate(together.mark(rules[rule]))
            proposals.append(Proposal(rule, rules[rule].height, effect, interval, score, p, correlation))
    proposals.sort(key=lambda one: (-abs(one.correlation), one.rule))
    rollouts = ordered.select(ROLLOUT_KEY).n_unique() if ordered.height else 0
    proposals = _different(proposals, {rule: np.concatenate(pair) for rule, pair in promising.items()})
    tasks = ordered["task"].n_unique()
    return RuleSearch(tuple(proposals), len(examined), len(promising), ordered.height, rollouts, tasks)


@dataclass(frozen=True, slots=True)
class _Half:
    """One half of the tasks, or all: C calls of T tasks."""

    calls: pl.DataFrame
    advantages: _Floats
    """(C,)"""
    task: NDArray[np.int64]
    """(C,): the number of each call's task."""

    @classmethod
    def of(cls, calls: pl.DataFrame) -> "_Half":
        task = calls.select(pl.col("task").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
        return cls(calls, calls["advantage"].cast(pl.Float64).to_numpy(), task)

    def mark(self, occurrences: pl.DataFrame) -> NDArray[np.bool_]:
        """(C,): whether a rule occurs at each call."""
        marked = self.calls.join(
            occurrences.select(*SPAN_KEY, pl.lit(value=True).alias("_occurs")),
            on=SPAN_KEY,
            how="left",
            maintain_order="left",
        )
        return np.asarray(marked["_occurs"].fill_null(value=False).to_numpy())

    def is_enough(self, mark: NDArray[np.bool_]) -> bool:
        return min(len(np.unique(self.task[mark])), len(np.unique(self.task[~mark]))) >= LEAST_TASKS

    def effect(self, mark: NDArray[np.bool_]) -> float:
        return float(self.advantages[mark].mean() - self.advantages[~mark].mean())

    def estimate(self, mark: NDArray[np.bool_]) -> tuple[float, tuple[float, float], float]:
        """The effect, its 95 % interval, and the effect shrunk by Stein's positive part, 1 − (error / effect)²."""
        centered = mark - mark.mean()
        effect, scale = self.effect(mark), float((centered**2).sum())
        rest = self.advantages - self.advantages.mean() - effect * centered
        scores = np.bincount(self.task, centered * rest)
        tasks = len(scores)
        deviation = float(np.sqrt((scores**2).sum() * tasks / (tasks - 1)) / scale * np.sqrt(tasks))
        half, error = t_half_width(deviation, tasks), deviation / np.sqrt(tasks)
        shrunk = effect * max(0.0, 1 - (error / effect) ** 2) if effect else 0.0
        return effect, (effect - half, effect + half), float(shrunk)

    def correlation(self, mark: NDArray[np.bool_]) -> float:
        return float(np.corrcoef(mark, self.advantages)[0, 1]) if np.ptp(self.advantages) > 0 else 0.0

    def p_values(self, marks: Mapping[str, NDArray[np.bool_]], seed: int) -> dict[str, float]:
        """Two-sided, of each rule: the share of sign flips whose covariance is at least as great, the data itself among them.

        Memory is bounded: signs are drawn in blocks, for all rules at once.
        """
        if not marks:
            return {}
        rest = self.advantages - self.advantages.mean()
        scores = np.stack([np.bincount(self.task, (mark - mark.mean()) * rest) for mark in marks.values()], axis=1)
        least = np.abs(scores.sum(0)) * (1 - 1e-12)
        generator, as_great = np.random.default_rng(seed), np.ones(len(marks))
        for start in range(0, FLIPS, _BLOCK):
            signs = generator.integers(0, 2, (min(_BLOCK, FLIPS - start), len(scores)), np.int8) * 2.0 - 1.0
            as_great += (np.abs(signs @ scores) >= least).sum(0)
        return dict(zip(marks, (as_great / (1 + FLIPS)).tolist(), strict=True))


def _half(calls: pl.DataFrame, seed: int) -> pl.Expr:
    """Whether a call is held out: half of the tasks, by the order of their hashes."""
    names = sorted(
        calls["task"].unique().to_list(),
        key=lambda each: hashlib.blake2b(f"{seed} {each}".encode(), digest_size=8).digest(),
    )
    return pl.col("task").is_in(names[len(names) // 2 :])


def _different(proposals: list[Proposal], marks: dict[str, NDArray[np.bool_]]) -> list[Proposal]:
    """The proposals without those that occur at the same calls as a stronger one; both would count one thing twice."""
    kept: list[Proposal] = []
    for one in proposals:
        own = marks[one.rule]
        shares = [(own & marks[other.rule]).sum() / (own | marks[other.rule]).sum() for other in kept]
        if max(shares, default=0.0) < SAME:
            kept.append(one)
    return kept


def _holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm's corrected p-values."""
    corrected, greatest = {}, 0.0
    for rank, (rule, p) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        greatest = max(greatest, min(1.0, p * (len(p_values) - rank)))
        corrected[rule] = greatest
    return corrected

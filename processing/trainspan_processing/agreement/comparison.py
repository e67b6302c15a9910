"""Two raters on the rollouts that both scored: agreement, kappa, calibration, and bias by length. Pure functions."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final

import polars as pl

from trainspan_processing.agreement.ratings import LABEL, is_of_people
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_schemas.artifacts.judge_report import CalibrationBin, Comparison, LengthBias
from trainspan_schemas.intervals import RewardEstimate, correlation_interval, kappa, kappa_interval

__all__ = ["compare", "passing", "share_of_tasks"]

_BINS: Final = 5
_LEAST: Final = 8
"""Rollouts below which nothing is said about length."""


def compare(ratings: pl.DataFrame, a: str, b: str, threshold: float, lengths: pl.DataFrame) -> Comparison | None:
    """The comparison of two raters in RATINGS; None if no rollout has scores of both.

    `lengths`: rollout_id, attempt, `tokens`. A score of at least `threshold` passes; with b = `label`, calibration and length bias
    are those of `a`.
    """
    first, second = (
        ratings.filter(pl.col("rater") == rater).select(*ROLLOUT_KEY, "group", pl.col("score").alias(name))
        for rater, name in ((a, "a"), (b, "b"))
    )
    both = first.join(second.drop("group"), on=ROLLOUT_KEY, how="inner").sort(ROLLOUT_KEY)
    if both.is_empty():
        return None
    both = both.with_columns(
        (pl.col("a") >= passing(a, threshold)).alias("pass_a"), (pl.col("b") >= passing(b, threshold)).alias("pass_b")
    )
    by_task = both.sort("group", *ROLLOUT_KEY).partition_by("group", maintain_order=True)
    agreement = RewardEstimate.of(
        [float(same) for same in task.select(pl.col("pass_a") == pl.col("pass_b")).to_series()] for task in by_task
    )
    tables = [_table(task) for task in by_task]
    total = _table(both)
    is_unit = bool(both.select(pl.col("a", "b").is_between(0, 1).all()).to_numpy().all())
    against_people = is_unit and b == LABEL
    return Comparison(
        a=a,
        b=b,
        n=both.height,
        tasks=len(by_task),
        agreement=agreement.record(),
        agreement_interval=agreement.interval if agreement.n > 1 else None,
        kappa=kappa(total),
        kappa_interval=kappa_interval(tables),
        milder=total[1] / both.height,
        stricter=total[2] / both.height,
        brier=float(both.select(((pl.col("a") - pl.col("b")) ** 2).mean()).item()) if against_people else None,
        calibration=_calibration(both) if against_people else [],
        length=_length(both, lengths) if against_people else None,
    )


def passing(rater: str, threshold: float) -> float:
    """The least score that passes; people say good (1) or bad (0)."""
    return 0.5 if is_of_people(rater) else threshold


def share_of_tasks(outcomes: Iterable[tuple[str, bool]]) -> tuple[float, tuple[float, float] | None]:
    """The share of true outcomes, each task (first) counted once, and its 95 % interval over tasks, None for fewer than two.

    There is at least one outcome.
    """
    tasks: dict[str, list[float]] = defaultdict(list)
    for task, outcome in outcomes:
        tasks[task].append(float(outcome))
    estimate = RewardEstimate.of(tasks.values())
    return estimate.mean, estimate.interval if estimate.n > 1 else None


def _table(both: pl.DataFrame) -> tuple[float, float, float, float]:
    pairs = list(both.select("pass_a", "pass_b").iter_rows())
    counts = [float(pairs.count(pair)) for pair in ((True, True), (True, False), (False, True), (False, False))]
    return counts[0], counts[1], counts[2], counts[3]


def _calibration(both: pl.DataFrame) -> Sequence[CalibrationBin]:
    """Bins of equal width of the score `a`, without empty ones; the last includes 1."""
    bins = []
    for number in range(_BINS):
        low, high = number / _BINS, (number + 1) / _BINS
        is_in = (pl.col("a") >= low) & ((pl.col("a") < high) | (number == _BINS - 1))
        if (part := both.filter(is_in)).is_empty():
            continue
        good, interval = share_of_tasks(part.select("group", pl.col("b") == 1).iter_rows())
        mean = float(part.group_by("group").agg(pl.col("a").mean())["a"].mean())  # type: ignore[arg-type]
        bins.append(CalibrationBin(low=low, high=high, n=part.height, mean=mean, good=good, interval=interval))
    return bins


def _length(both: pl.DataFrame, lengths: pl.DataFrame) -> LengthBias | None:
    """None for fewer than _LEAST rollouts with tokens, or if all lengths or all differences are equal."""
    known = both.join(lengths, on=ROLLOUT_KEY, how="inner").with_columns((pl.col("a") - pl.col("b")).alias("excess"))
    if known.height < _LEAST or known["tokens"].n_unique() < 2 or known["excess"].n_unique() < 2:
        return None
    correlation = float(known.select(pl.corr("tokens", "excess", method="spearman")).item())
    ordered = known.sort("tokens", *ROLLOUT_KEY)["excess"].to_list()
    half = len(ordered) // 2
    return LengthBias(
        n=known.height,
        correlation=correlation,
        interval=correlation_interval(correlation, known["group"].n_unique()),
        shorter=fmean(itertools.islice(ordered, half)),
        longer=fmean(ordered[len(ordered) - half :]),
    )

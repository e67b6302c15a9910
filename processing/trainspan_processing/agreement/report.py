"""The report on judges: every comparison, the bias by position, the cost of a verdict, and the disagreements with people."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Final

import polars as pl

from trainspan_processing.agreement.comparison import compare, passing, share_of_tasks
from trainspan_processing.agreement.lengths import read_lengths
from trainspan_processing.agreement.ratings import LABEL, Ratings, is_of_people, read_ratings
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_schemas.artifacts.judge_report import (
    Disagreement,
    JudgeFigures,
    JudgeReport,
    PairAgreement,
    PositionBias,
    RaterRecord,
)
from trainspan_schemas.intervals import Z_95

__all__ = ["judge_report"]

_MOST_RATERS: Final = 12
_MOST_LISTED: Final = 200
_SUMMED: Final = ("requests", "cached", "prompt_tokens", "completion_tokens")


def judge_report(
    source: Source,
    figures: Iterable[JudgeFigures],
    *,
    run_id: str | None = None,
    round_: int | None = None,
    threshold: float = 0.5,
) -> JudgeReport:
    """Compares the raters of the ended rollouts of a run and round, or of all. Raises StoreError.

    `figures` are what judges counted on this machine. Compared are `label` and the twelve others of the most rollouts.
    """
    ratings = read_ratings(source, Selection(run_id=run_id, round=round_))
    counted = [each for each in figures if run_id in (None, each["run_id"]) and round_ in (None, each["round"])]
    frame = ratings.frame
    raters = _raters(frame, counted, threshold)
    lengths = read_lengths(source, sorted({rollout_id for rollout_id, _ in ratings.labels}))
    others = [rater["name"] for rater in raters if rater["name"] != LABEL]
    names = [*others[:_MOST_RATERS], *(rater["name"] for rater in raters if rater["name"] == LABEL)]
    # People are the second of each pair, whatever their number of rollouts.
    ordered = sorted(names, key=lambda name: (name == LABEL, is_of_people(name)))
    compared = (compare(frame, a, b, threshold, lengths) for a, b in itertools.combinations(ordered, 2))
    comparisons = [each for each in compared if each is not None]
    disagreements = list(_disagreements(ratings, names, threshold))
    return JudgeReport(
        run_id=run_id,
        round=round_,
        threshold=threshold,
        rollouts=ratings.rollouts,
        labeled=len(ratings.labels),
        labels_without_rollout=ratings.without_rollout,
        raters=raters,
        raters_left_out=max(0, len(others) - _MOST_RATERS),
        comparisons=sorted(comparisons, key=lambda each: (each["b"] != LABEL, -each["n"], each["a"], each["b"])),
        pairs=list(_pairs(ratings, names)),
        position=[*_position_of_people(ratings), *_position_of_judges(counted)],
        disagreements=disagreements[:_MOST_LISTED],
        n_disagreements=len(disagreements),
    )


def _raters(frame: pl.DataFrame, figures: Sequence[JudgeFigures], threshold: float) -> list[RaterRecord]:
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for each in figures:
        sums[each["judge"]]["verdicts"] += each["verdicts"]
        for name in _SUMMED:
            sums[each["judge"]][name] += int(each["figures"].get(name, 0))
    records = []
    for (rater,), rows in frame.partition_by("rater", as_dict=True, maintain_order=True).items():
        scores, name = rows["score"].to_list(), str(rater)
        passed = sum(score >= passing(name, threshold) for score in scores) / len(scores)
        figures_of = dict(sums.get(name, {}))
        records.append(
            RaterRecord(name=name, rollouts=len(scores), mean=mean(scores), passed=passed, figures=figures_of)
        )
    return sorted(records, key=lambda record: (-record["rollouts"], record["name"]))


def _disagreements(ratings: Ratings, names: Sequence[str], threshold: float) -> Iterable[Disagreement]:
    """Of each rater but people, the worst first."""
    judged = ratings.frame.filter(pl.col("rater").is_in([name for name in names if not is_of_people(name)]))
    labels = pl.DataFrame(
        [(*key, label.score) for key, label in ratings.labels.items()],
        {"rollout_id": pl.String, "attempt": pl.Int32, "said": pl.Float64},
        orient="row",
    )
    both = judged.join(labels, on=ROLLOUT_KEY, how="inner").filter(
        (pl.col("score") >= threshold) != (pl.col("said") >= 0.5)
    )
    for row in both.sort((pl.col("score") - pl.col("said")).abs(), *ROLLOUT_KEY, descending=True).iter_rows(named=True):
        label = ratings.labels[row["rollout_id"], row["attempt"]]
        yield Disagreement(
            rollout_id=label.rollout_id,
            attempt=label.attempt,
            task_id=row["task_id"],
            rater=row["rater"],
            score=row["score"],
            label=label.word,
            by=label.by,
            reason=label.reason,
            explanation=row["explanation"],
        )


def _pairs(ratings: Ratings, names: Sequence[str]) -> Iterable[PairAgreement]:
    decided = [
        ((label.rollout_id, label.attempt), label.other, 1 if label.word == "better" else -1)
        for label in ratings.preferences
        if label.other is not None and label.word != "equal"
    ]
    for name in names:
        if is_of_people(name):
            continue
        own = ratings.frame.filter(pl.col("rater") == name).select(*ROLLOUT_KEY, "score").iter_rows()
        scores: Mapping[tuple[str, int], float] = {(rollout_id, attempt): score for rollout_id, attempt, score in own}
        gaps = [
            (ratings.groups[one], (scores[one] - scores[other]) * sign)
            for one, other, sign in decided
            if one in scores and other in scores
        ]
        if not gaps:
            continue
        settled = [(group, gap > 0) for group, gap in gaps if gap]
        share, interval = share_of_tasks(settled) if settled else (None, None)
        yield PairAgreement(
            rater=name,
            n=len(gaps),
            agree=sum(is_same for _, is_same in settled),
            ties=len(gaps) - len(settled),
            share=share,
            interval=interval,
        )


def _position_of_people(ratings: Ratings) -> Iterable[PositionBias]:
    """How often the left one of a pair is called better."""
    decided = [label for label in ratings.preferences if label.word != "equal" and label.place is not None]
    if decided:
        bias, interval = share_of_tasks(
            (ratings.groups[label.rollout_id, label.attempt], (label.place == 0) == (label.word == "better"))
            for label in decided
        )
        yield PositionBias(rater=LABEL, n=len(decided), bias=bias, interval=interval)


def _position_of_judges(figures: Sequence[JudgeFigures]) -> Iterable[PositionBias]:
    """The position biases of comparing judges, as means over the groups of all their runs."""
    by_judge: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for each in figures:
        if "position_bias" in each["figures"]:
            by_judge[each["judge"]].append(each["figures"])
    for judge, runs in sorted(by_judge.items()):
        groups = sum(run["both_orders"] for run in runs)
        bias = sum(run["position_bias"] * run["both_orders"] for run in runs) / groups
        errors = [run.get("position_bias_error") for run in runs]
        half = None
        if all(error is not None for error in errors):
            weighted = ((error or 0.0) * run["both_orders"] for error, run in zip(errors, runs, strict=True))
            half = Z_95 * math.sqrt(sum(error**2 for error in weighted)) / groups
        interval = None if half is None else (bias - half, bias + half)
        yield PositionBias(rater=judge, n=int(groups), bias=bias, interval=interval)

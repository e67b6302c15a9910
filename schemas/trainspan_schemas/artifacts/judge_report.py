"""The result of `trainspan judges`: how judges agree with people's labels and with each other, and what a verdict costs.

A runner appends what its judge counted to `judges.jsonl` in its run's folder, one line per process.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypedDict, cast

from trainspan_schemas.files.durable import append_line, json_lines
from trainspan_schemas.home import home
from trainspan_schemas.intervals import EstimateRecord

__all__ = [
    "CalibrationBin",
    "Comparison",
    "Disagreement",
    "JudgeFigures",
    "JudgeReport",
    "LengthBias",
    "PairAgreement",
    "PositionBias",
    "RaterRecord",
    "judge_figures",
    "write_judge_figures",
]

_FOLDER: Final = "rollouts"
_FILE: Final = "judges.jsonl"

Interval = tuple[float, float]
"""Of 95 %."""


class JudgeFigures(TypedDict):
    """What the judge of one runner's process counted."""

    judge: str
    run_id: str
    round: int | None
    verdicts: int
    """Rollouts that it was asked about."""
    figures: Mapping[str, float]
    """As in `RolloutsDone.judge`."""


class RaterRecord(TypedDict):
    """Who scores rollouts: a judge, one of its criteria, other evaluations, `label`, or a single person."""

    name: str
    rollouts: int
    mean: float
    passed: float
    """Share of verdicts that pass."""
    figures: Mapping[str, float]
    """Of a judge, over all its runs on this machine: the sums of its JudgeFigures, and `verdicts`; empty if none are there."""


class CalibrationBin(TypedDict):
    """The rollouts to which the judge gave a score within [low, high). Each task counts once."""

    low: float
    high: float
    n: int
    """Rollouts."""
    mean: float
    """Of the scores."""
    good: float
    """Share that people call good."""
    interval: Interval | None
    """Over tasks; None for fewer than two."""


class LengthBias(TypedDict):
    """Whether the judge is milder than people where an answer is longer."""

    n: int
    correlation: float
    """Spearman's, of the sampled tokens of a rollout with the judge's score minus the label's."""
    interval: Interval | None
    """As if each task were one rollout; None for fewer than four tasks."""
    shorter: float
    """Mean of that difference over the shorter half."""
    longer: float


class Comparison(TypedDict):
    """Two raters on the rollouts that both scored. Each task counts once, as its rollouts are not independent."""

    a: str
    b: str
    n: int
    """Rollouts."""
    tasks: int
    agreement: EstimateRecord
    agreement_interval: Interval | None
    kappa: float | None
    """Cohen's; None if chance alone agrees always."""
    kappa_interval: Interval | None
    milder: float
    """Share of rollouts that only `a` lets pass."""
    stricter: float
    """Share that only `b` lets pass."""
    brier: float | None
    """Mean squared difference of the scores, if one of the two is `label` and all scores are from 0 to 1."""
    calibration: Sequence[CalibrationBin]
    length: LengthBias | None


class PairAgreement(TypedDict):
    """A judge on the pairs of which people called one better."""

    rater: str
    n: int
    agree: int
    ties: int
    """Pairs with equal scores."""
    share: float | None
    """Of the pairs without ties, each task counted once; None without any."""
    interval: Interval | None
    """Over tasks; None for fewer than two."""


class PositionBias(TypedDict):
    """Who prefers what is shown at the left or first."""

    rater: str
    n: int
    bias: float
    """Of people: the share of decided pairs in which the left one is better, each task counted once. Of a comparing judge: how much
    more of 1 an attempt gets for standing earlier."""
    interval: Interval | None


class Disagreement(TypedDict):
    """A rollout on which a rater and people differ."""

    rollout_id: str
    attempt: int
    task_id: str | None
    rater: str
    score: float
    label: str
    by: str
    reason: str | None
    explanation: str | None
    """The judge's."""


class JudgeReport(TypedDict):
    """The whole result."""

    run_id: str | None
    round: int | None
    threshold: float
    rollouts: int
    labeled: int
    """Rollouts with a label."""
    labels_without_rollout: int
    """Labels of rollouts that are not stored here."""
    raters: Sequence[RaterRecord]
    raters_left_out: int
    """Those that are compared with nobody: others score more rollouts. Never `label`."""
    comparisons: Sequence[Comparison]
    pairs: Sequence[PairAgreement]
    position: Sequence[PositionBias]
    disagreements: Sequence[Disagreement]
    """At most 200."""
    n_disagreements: int


def write_judge_figures(folder: Path, figures: JudgeFigures) -> None:
    """Appends them to the file in the folder of their run's ledgers. Raises OSError."""
    append_line(folder / _FILE, json.dumps(figures))


def judge_figures() -> list[JudgeFigures]:
    """Those of all runs in this state folder. Lines of another form are left out."""
    lines = (line for path in sorted((home() / _FOLDER).glob(f"*/{_FILE}")) for line in json_lines(path))
    return [cast("JudgeFigures", line) for line in lines if line.keys() == JudgeFigures.__annotations__.keys()]

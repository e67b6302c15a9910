"""Stop conditions of a run: its number of rounds, its validations, or its time."""

import math
from collections.abc import Mapping, Sequence

from trainspan_schemas.artifacts.run_records import EvalRecord, RunRecord, evaluations_in
from trainspan_schemas.config.settings import LoopSettings
from trainspan_schemas.intervals import RewardEstimate

__all__ = ["best_validation", "spent_s", "stop_reason"]


def stop_reason(settings: LoopSettings, records: Sequence[RunRecord], round_: int) -> str | None:
    """The reason to end the run after `round_`, or None.

    It depends only on the records up to that round and not on the final validation, so that a resumed run, which has more,
    decides the same.
    """
    records = [record for record in records if record["round"] <= round_]
    if round_ >= settings.rounds:
        return f"all {settings.rounds} rounds are done"
    first: dict[int, EvalRecord] = {}
    for record in evaluations_in(records, "validation"):
        first.setdefault(record["round"], record)  # a second one of a round is the final one
    validations = list(first.values())
    if validations and settings.stop_at is not None:
        reached = _standing(validations[-1])
        if reached >= settings.stop_at:
            return f"validation reached {reached:.3f}, [loop] stop_at is {settings.stop_at:g}"
    best = best_validation(validations)
    if best is not None and settings.patience is not None:
        since = sum(record["round"] > best["round"] for record in validations)
        if since >= settings.patience:
            return f"{since} validations without a better one than after round {best['round']} ([loop] patience)"
    hours = spent_s(records) / 3600
    if settings.max_hours is not None and hours >= settings.max_hours:
        return f"{hours:.2f} hours of rounds and validations, [loop] max_hours is {settings.max_hours:g}"
    return None


def spent_s(records: Sequence[RunRecord]) -> float:
    """The seconds of all rounds and validations."""
    return sum(_seconds(record) for record in records)


def best_validation(records: Sequence[RunRecord]) -> EvalRecord | None:
    """The validation with the highest mean reward, the earliest among equals; None if none stands (see `_standing`)."""
    validations = [record for record in evaluations_in(records, "validation") if not math.isnan(_standing(record))]
    return max(validations, key=lambda record: (_standing(record), -record["round"])) if validations else None


def _standing(record: EvalRecord) -> float:
    """The mean reward; NaN if no rollout had one, or if so many were left out that the mean of the others says little."""
    estimate = RewardEstimate.of_record(record)
    return estimate.mean if estimate.stands else math.nan


def _seconds(record: RunRecord) -> float:
    seconds = record["seconds"]
    return float(seconds["total"] if isinstance(seconds, Mapping) else seconds)

"""Comparison of runs: their differing settings, and the results over their seeds."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_loop.state.run_folder import ADDRESSES, RunFolder
from trainspan_schemas.artifacts.run_records import evaluations_in, rounds_in
from trainspan_schemas.errors import UsageError
from trainspan_schemas.intervals import RewardEstimate, measured, t_interval

__all__ = ["Band", "ComparedRun", "Gain", "Series", "group_runs", "measured_in"]

SEEDS = (("loop", "seed"), ("train", "seed"))
"""Settings in which runs of one series may differ."""


@dataclass(frozen=True, slots=True)
class Band:
    """Held-out mean reward after `round`, over the seeds with that validation; 95 % `interval`, None for a single seed."""

    round: int
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Gain:
    """The mean of `n` seeds with its 95 % t-interval, None if their spread is unknown."""

    mean: float
    interval: tuple[float, float] | None
    n: int


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Summary of a run. Estimates are over held-out tasks."""

    run_id: str
    seed: int
    status: str
    rounds: int
    start: RewardEstimate
    end: RewardEstimate
    gain: float | None
    """From the validation before the first round to the last one; None if there are not both, or one does not stand."""
    best: RewardEstimate
    best_round: int
    seconds: float
    alarms: int
    """Checks of the integrity panel that did not hold."""


@dataclass(frozen=True, slots=True)
class Series:
    """Runs of the same settings except for the seed; `label` names the settings that distinguish them from other series.

    If several have one seed, the one with the most rounds counts for it, of equals the newest.
    """

    label: str
    runs: tuple[RunFolder, ...]

    def outcomes(self) -> list[ComparedRun]:
        return [outcome(run) for run in self.runs]

    def counted(self) -> list[ComparedRun]:
        """One run for each seed."""
        of_seed: dict[int, ComparedRun] = {}
        for run in sorted(self.outcomes(), key=lambda run: (run.rounds, run.run_id)):
            of_seed[run.seed] = run
        return list(of_seed.values())

    def validation(self) -> list[Band]:
        """The bands by round, over the seeds."""
        means: defaultdict[int, list[float]] = defaultdict(list)
        counted = {run.run_id for run in self.counted()}
        for run in self.runs:
            for round_, estimate in _validations(run).items() if run.run_id in counted else ():
                means[round_].append(estimate.mean)
        return [Band(round_, sum(values) / len(values), t_interval(values)) for round_, values in sorted(means.items())]

    def gain(self) -> "Gain | None":
        """The mean gain over the seeds; None if no run has one."""
        gains = [run.gain for run in self.counted() if run.gain is not None]
        return Gain(sum(gains) / len(gains), t_interval(gains), len(gains)) if gains else None


def measured_in(series: Sequence[Series]) -> str:
    """The quantity measured by the validations of all runs: "success" or "reward"."""
    return measured(estimate for group in series for run in group.runs for estimate in _validations(run).values())


def outcome(run: RunFolder) -> ComparedRun:
    """Summarizes a run with a validation."""
    record, records, validations = run.read("run.json"), run.records(), _validations(run)
    best_round = max(validations, key=lambda round_: (validations[round_].stands, validations[round_].mean, -round_))
    rounds = rounds_in(records)
    start, end = validations[min(validations)], validations[max(validations)]
    return ComparedRun(
        run_id=run.run_id,
        seed=int(record["settings"]["loop"]["seed"]),
        status=str(record.get("status")),
        rounds=len(rounds),
        start=start,
        end=end,
        gain=end.mean - start.mean if set(validations) > {0} and start.stands and end.stands else None,
        best=validations[best_round],
        best_round=best_round,
        seconds=sum(
            record["seconds"]["total"] if record["kind"] == "round" else record["seconds"] for record in records
        ),
        alarms=sum(not check["ok"] for record in records for check in record["checks"]),
    )


def group_runs(runs: Sequence[RunFolder]) -> list[Series]:
    """The series in the order of their first run, labeled by the settings in which they differ.

    Runs without a validation are left out; raises UsageError if all are.
    """
    if not (runs := [run for run in runs if _validations(run)]):
        raise UsageError("no run has a validation with rewards yet: nothing to compare")
    flat = {run: _flat(run.read("run.json").get("settings", {})) for run in runs}
    keys = {key for settings in flat.values() for key in settings}
    differing = sorted(key for key in keys if len({_text(settings.get(key)) for settings in flat.values()}) > 1)
    members: defaultdict[str, list[RunFolder]] = defaultdict(list)
    for run, settings in flat.items():
        members[", ".join(f"{key}={_text(settings.get(key))}" for key in differing)].append(run)
    return [Series(label or "all", tuple(group)) for label, group in members.items()]


def _validations(run: RunFolder) -> dict[int, RewardEstimate]:
    """The last validation of each round: the final one has more tasks."""
    return {
        int(record["round"]): RewardEstimate.of_record(record)
        for record in evaluations_in(run.records(), "validation")
        if record["n"]
    }


def _flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    return {
        f"{section}.{key}": value
        for section, values in settings.items()
        for key, value in values.items()
        if (section, key) not in (*SEEDS, *ADDRESSES)
    }


def _text(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)

"""The runs of the loop, from their folders: status, validations, best, alarms."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.artifacts.run_files import RunFiles, record_of
from trainspan_schemas.artifacts.run_records import EvalName, RoundRecord, RunRecord, evaluations_in, rounds_in
from trainspan_schemas.errors import TrainspanError
from trainspan_schemas.intervals import RewardEstimate
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.sources import Sources

__all__ = ["RunRecords", "RunSummary", "RunsModel", "Validation", "load_runs", "read_run", "summary_of"]


class RunError(TrainspanError):
    """The files of a run cannot be read."""


_MOST_RUNS = 200


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What is on disk of one run."""

    run_id: str
    run: Mapping[str, Any]
    """run.json"""
    records: Sequence[RunRecord]
    """rounds.jsonl"""
    metrics: Mapping[str | None, Mapping[int, Mapping[str, Any]]]
    """Policy → round → the line of its trainer; a single policy is None."""
    is_held: bool
    """Whether a loop is running it now."""

    @property
    def status(self) -> str:
        status = str(self.run.get("status", "unknown"))
        return "interrupted" if status == "running" and not self.is_held else status

    @property
    def policies(self) -> tuple[str | None, ...]:
        """Those that the run trains."""
        return tuple(self.metrics)

    def rounds_of(self, policy: str | None) -> list[RoundRecord]:
        """The rounds as a policy sees them."""
        return [record_of(record, policy) for record in self.rounds]

    @property
    def rounds(self) -> list[RoundRecord]:
        return rounds_in(self.records)

    def evals(self, name: EvalName = "validation") -> "list[Validation]":
        """The evaluations of this name, in order of rounds."""
        records = evaluations_in(self.records, name)
        estimates = [Validation(record["round"], RewardEstimate.of_record(record)) for record in records]
        return sorted(estimates, key=lambda validation: validation.round)

    @property
    def alarms(self) -> list[tuple[int, int, str, str]]:
        """(place in `records`, round, check, detail) of the checks that do not hold."""
        return [
            (index, record["round"], check["name"], check["detail"])
            for index, record in enumerate(self.records)
            for check in record["checks"]
            if not check["ok"]
        ]


@dataclass(frozen=True, slots=True)
class Validation:
    """A validation after a round."""

    round: int
    estimate: RewardEstimate


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A row of the list of runs."""

    run_id: str
    status: str
    target: str
    """The agent."""
    model: str
    rounds_done: int
    rounds: int | None
    validations: Sequence[Validation]
    best: Validation | None
    alarms: int
    error: str = ""
    """Why the run cannot be read; the rest is then empty."""


@dataclass(frozen=True, slots=True)
class RunsModel:
    """The page with all runs."""

    runs: Sequence[RunSummary]
    n_runs: int
    params: Params


_OF_ROUNDS = ("round", "policy_version", "rollout", "dataset", "train", "seconds", "checks")
_OF_EVALUATIONS = ("round", "name", "policy_version", "status", "checks")
_OF_CHECKS = {"name", "ok", "detail"}
_Stamp = tuple[int, ...]
_MOST_RECORDS = 8
"""Runs whose records are kept; of the others only the summaries are."""
_records: dict[Path, tuple[_Stamp, RunRecords]] = {}
_summaries: dict[Path, tuple[_Stamp, RunSummary]] = {}
_lock = threading.Lock()


def load_runs(sources: Sources, params: Params) -> RunsModel:
    """The newest runs."""
    runs = sources.paths.all_runs()
    return RunsModel([summary_of(run) for run in runs[:_MOST_RUNS]], len(runs), params)


def summary_of(run: RunFiles) -> RunSummary:
    """The row of a run, made again only if a file has changed. A run that cannot be read has a row that says so."""
    stamp: _Stamp = ()
    try:
        stamp = _stamp_of(run)
        with _lock:
            cached = _summaries.get(run.path)
        if cached and cached[0] == stamp:
            return cached[1]
        summary = _summary(_parsed(run, stamp))
    except (OSError, LookupError, ValueError, TypeError, AttributeError, TrainspanError) as error:
        reason = f"cannot be read: {error}" if isinstance(error, TrainspanError) else f"cannot be read: {error!r}"
        summary = RunSummary(run.run_id, "unknown", "", "", 0, None, [], None, 0, reason[:300])
    with _lock:
        if len(_summaries) >= 2 * _MOST_RUNS:
            _summaries.clear()
        _summaries[run.path] = (stamp, summary)
    return summary


def read_run(run: RunFiles) -> RunRecords:
    """The records of a run, parsed again only if a file has changed. Raises RunError if they cannot be read."""
    try:
        stamp = _stamp_of(run)
    except OSError as error:
        raise RunError(f"run {run.run_id} cannot be read: {error}") from error
    with _lock:
        cached = _records.get(run.path)
    if cached and cached[0] == stamp:
        return cached[1]
    records = _parsed(run, stamp)
    with _lock:
        if len(_records) >= _MOST_RECORDS:
            _records.pop(next(iter(_records)))
        _records[run.path] = (stamp, records)
    return records


def _stamp_of(run: RunFiles) -> _Stamp:
    """Differs if a file of the run has changed, or if the loop has begun or ended."""
    metrics = (run.metrics_file(), *sorted(run.checkpoints.glob(f"*/{run.metrics_file().name}")))
    parts = [run.path / "run.json", run.path / "rounds.jsonl", *metrics]
    return (*(part for path in parts for part in _stamp(path)), int(run.is_held()))


def _parsed(run: RunFiles, stamp: _Stamp) -> RunRecords:
    try:
        metrics = {policy: run.metrics(policy) for policy in run.policies()}
        parsed = RunRecords(run.run_id, run.read("run.json"), run.records(), metrics, bool(stamp[-1]))
        _check(parsed)
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"run {run.run_id} cannot be read: {error!r}"[:300]) from error
    return parsed


def _check(run: RunRecords) -> None:
    """Raises LookupError or TypeError if a page could not show these records."""
    settings = run.run.get("settings", {})
    if not all(isinstance(section, dict) for section in settings.values()):
        raise TypeError("run.json: a section of the settings is not an object")
    for record in run.records:
        needed = _OF_ROUNDS if record["kind"] == "round" else _OF_EVALUATIONS
        if missing := [name for name in needed if name not in record]:
            raise LookupError(f"rounds.jsonl: a {record['kind']} record without {missing[0]}")
        if not all(check.keys() >= _OF_CHECKS for check in record["checks"]):
            raise LookupError("rounds.jsonl: a check without a name, an outcome or a detail")


def _summary(run: RunRecords) -> RunSummary:
    validations = run.evals()
    settings = run.run.get("settings", {})
    loop, train = settings.get("loop", {}), settings.get("train", {})
    best = run.run.get("best")
    return RunSummary(
        run_id=run.run_id,
        status=run.status,
        target=str(loop.get("target") or ""),
        model=str(train.get("model") or ""),
        rounds_done=len(run.rounds),
        rounds=loop.get("rounds"),
        validations=validations,
        best=Validation(best["round"], RewardEstimate.of_record(best)) if best else None,
        alarms=len(run.alarms),
    )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size

"""One run: its figures by round, the integrity checks, the configuration and how it differs from another run's."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainspan_schemas.artifacts.run_records import RoundRecord, RunRecord
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.config.load import POLICIES
from trainspan_schemas.config.settings import Settings
from trainspan_viewer.queries.params import Params, Part
from trainspan_viewer.queries.paths import NotFoundError
from trainspan_viewer.queries.runs import RunRecords, read_run
from trainspan_viewer.queries.sources import Sources

__all__ = ["CheckRow", "CompareModel", "RunModel", "SettingRow", "Stage", "load_compare", "load_run", "whole_run"]

_PAGE = 50
_MOST_COMPARED = 8
_MOST_STAGES = 120


@dataclass(frozen=True, slots=True)
class Stage:
    """What was checked together: a round, or an evaluation."""

    index: int
    """Its place in rounds.jsonl, which is its address."""
    round: int
    kind: str
    """`round`, or the name of the evaluation."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check over the stages: True, False, or None if it was not made there."""

    name: str
    holds: Sequence[bool | None]
    details: Sequence[str]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting of the run."""

    section: str
    name: str
    value: Any
    default: Any

    @property
    def is_default(self) -> bool:
        return bool(self.value == self.default)


@dataclass(frozen=True, slots=True)
class RunModel:
    """The page of a run."""

    records: RunRecords
    stages: Sequence[Stage]
    """One page of them, in order."""
    stages_part: Part
    checks: Sequence[CheckRow]
    rounds: Sequence[tuple[int, RoundRecord]]
    """One page of rounds with their paths in rounds.jsonl, newest first."""
    part: Part
    """Of the rounds."""
    settings: Sequence[SettingRow]
    datasets: Mapping[tuple[int, str | None], str]
    """Round and policy → name of the dataset, for the rounds of this page."""
    others: Sequence[str]
    """Other runs, newest first."""
    params: Params
    training: TrainingProgress | None = None
    """How far the training in progress is."""


@dataclass(frozen=True, slots=True)
class CompareModel:
    """Several runs side by side."""

    runs: Sequence[RunRecords]
    n_chosen: int
    """Number of runs that were asked for."""
    differences: Sequence[tuple[str, Sequence[Any]]]
    """Setting → its value in each run, if they differ."""
    params: Params


def load_run(sources: Sources, params: Params) -> RunModel:
    """Raises NotFoundError."""
    paths = sources.paths
    files = paths.run(params.text("run"))
    model = _model(read_run(files), params, page_size=_PAGE)
    numbers = {record["round"] for _, record in model.rounds}
    datasets = {(location.round, location.policy): location.name for location in paths.datasets_of(files)}
    return dataclasses.replace(
        model,
        datasets={key: name for key, name in datasets.items() if key[0] in numbers},
        others=[run.run_id for run in paths.all_runs()[:200] if run.run_id != model.records.run_id],
        training=TrainingProgress(**progress) if (progress := files.training()) else None,
    )


def whole_run(records: RunRecords) -> RunModel:
    """The model with all rounds, without links to datasets and other runs."""
    return _model(records, Params("", {}, {}), page_size=max(1, len(records.rounds)))


def _model(records: RunRecords, params: Params, *, page_size: int) -> RunModel:
    every = list(enumerate(records.records))
    rounds = [(index, record) for index, record in reversed(every) if record["kind"] == "round"]
    start = params.integer("from", 0, most=max(0, len(rounds) - 1))
    newest = max(0, len(every) - _MOST_STAGES)
    first = params.integer("checks_from", newest, most=max(0, len(every) - 1))
    checked = every[first : first + _MOST_STAGES]
    return RunModel(
        records=records,
        stages=[Stage(index, record["round"], _kind(record)) for index, record in checked],
        stages_part=Part(first, _MOST_STAGES, len(every)),
        checks=_checks([record for _, record in checked]),
        rounds=rounds[start : start + page_size],
        part=Part(start, page_size, len(rounds)),
        settings=_settings(records.run.get("settings", {})),
        datasets={},
        others=[],
        params=params,
    )


def load_compare(sources: Sources, params: Params) -> CompareModel:
    """The runs named by `run`, at most eight. Raises NotFoundError if there are none."""
    names = list(dict.fromkeys(params.all("run")))
    if not names:
        raise NotFoundError("no run was chosen: mark some in the list of runs")
    runs = [read_run(sources.paths.run(name)) for name in names[:_MOST_COMPARED]]
    flat = [_flat(run.run.get("settings", {})) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = [(key, [settings.get(key) for settings in flat]) for key in keys]
    differences = [(key, values) for key, values in rows if any(value != values[0] for value in values)]
    return CompareModel(runs, len(names), differences, params)


def _kind(record: RunRecord) -> str:
    return "round" if record["kind"] == "round" else record["name"]


def _checks(records: Sequence[RunRecord]) -> list[CheckRow]:
    names = list(dict.fromkeys(check["name"] for record in records for check in record["checks"]))
    by_name = [{check["name"]: check for check in record["checks"]} for record in records]
    return [
        CheckRow(
            name,
            [checks[name]["ok"] if name in checks else None for checks in by_name],
            [checks[name]["detail"] if name in checks else "" for checks in by_name],
        )
        for name in names
    ]


def _settings(stored: Mapping[str, Mapping[str, Any]]) -> list[SettingRow]:
    # As runs store them: tuples are lists.
    defaults = json.loads(json.dumps(dataclasses.asdict(Settings()), default=str))
    return [
        SettingRow(section, name, value, defaults.get(section, {}).get(name))
        for section, values in _sections(stored)
        for name, value in values.items()
    ]


def _flat(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    return {f"[{section}] {name}": value for section, values in _sections(stored) for name, value in values.items()}


def _sections(stored: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections as in `trainspan.toml`, where each policy has its own."""
    for section, values in stored.items():
        if section == POLICIES:
            yield from ((f"{section}.{name}", policy_values) for name, policy_values in values.items())
        else:
            yield section, values

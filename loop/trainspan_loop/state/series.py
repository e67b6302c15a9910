"""Runs of the same settings with different seeds, in sequence, resumable as a whole."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from trainspan_loop.state.run_folder import RunFolder, is_same_run
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.errors import UsageError
from trainspan_schemas.home import make_home, runs_dir

__all__ = ["SeedSeries", "continued", "with_seed"]


def with_seed(settings: Settings, offset: int) -> Settings:
    """The settings with `offset` added to both seeds (task draws, training)."""
    return dataclasses.replace(
        settings,
        loop=dataclasses.replace(settings.loop, seed=settings.loop.seed + offset),
        train=dataclasses.replace(settings.train, seed=settings.train.seed + offset),
    )


def continued(settings: Settings, folder: RunFolder, *, finish: bool) -> Settings:
    """The settings with which a run goes on: to `rounds`, but not to fewer than were begun; with `finish` to just these.

    Raises UsageError if there is nothing to finish.
    """
    begun = folder.last_begun()
    if finish and not begun:
        raise UsageError(f"--finish: no round of run {folder.run_id} has a dataset yet")
    rounds = begun if finish else max(settings.loop.rounds, begun)
    return dataclasses.replace(settings, loop=dataclasses.replace(settings.loop, rounds=rounds))


class SeriesRecord(TypedDict):
    """What is on disk of a series."""

    settings: Mapping[str, Any]
    seeds: int
    name: str | None
    status: Literal["running", "finished"]
    runs: Mapping[str, str]
    """Seed → run id, of the runs that were begun."""


class SeedSeries:
    """`runs/series-<time>.json`: the run of each seed. A finished run is not repeated on resume."""

    def __init__(self, path: Path, settings: Settings, seeds: int, name: str | None = None) -> None:
        self.path = path
        self._settings = settings
        self._seeds = seeds
        self._name = name

    @classmethod
    def open(cls, settings: Settings, seeds: int, name: str | None = None, *, resume: bool) -> "SeedSeries":
        """Opens a new series, or with `resume` the newest of the name, if it has the same settings and number of seeds.

        It must be unfinished, unless it has a name: the same commands of several series can then be given again.
        """
        make_home()
        runs_dir().mkdir(exist_ok=True)
        suffix = f"-{name}" if name else ""
        known = sorted(runs_dir().glob("series-*.json"), reverse=True)
        for path in known if resume else []:
            series = cls(path, settings, seeds, name)
            record = series._read()
            if not record or record.get("name") != name:
                continue
            goes_on = record["status"] == "running" or name is not None
            if goes_on and record["seeds"] == seeds and is_same_run(_plain(settings), record["settings"]):
                return series
            break
        series = cls(runs_dir() / f"series-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}{suffix}.json", settings, seeds, name)
        plain = _plain(settings)
        series._write({"settings": plain, "seeds": seeds, "name": name, "status": "running", "runs": {}})
        return series

    def unfinished(self, *, begun_only: bool = False) -> Iterator[tuple[Settings, RunFolder]]:
        """The remaining runs with their settings; each is created when its turn comes, or with `begun_only` left out."""
        for offset in range(self._seeds):
            settings = with_seed(self._settings, offset)
            name = str(settings.loop.seed)
            runs = self._read()["runs"]
            folder = RunFolder(runs_dir() / runs[name]) if name in runs else None
            record = folder.read_whole("run.json") if folder else {}
            if folder is None or not record:
                if begun_only:
                    continue
                folder = RunFolder.create(dataclasses.asdict(settings), self._name)
                self._write({**self._read(), "runs": {**runs, name: folder.run_id}})
            if record.get("status") != "finished":
                yield settings, folder

    def runs(self) -> list[RunFolder]:
        """All started runs, by seed."""
        return [RunFolder(runs_dir() / run_id) for run_id in self._read()["runs"].values()]

    def finish(self) -> None:
        self._write({**self._read(), "status": "finished"})

    def _read(self) -> SeriesRecord:
        return cast("SeriesRecord", RunFolder(self.path.parent).read_whole(self.path.name))

    def _write(self, record: SeriesRecord) -> None:
        RunFolder(self.path.parent).write(self.path.name, record)


def _plain(settings: Settings) -> Any:
    """The settings as read back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))

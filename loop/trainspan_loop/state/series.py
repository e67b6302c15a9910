"""Runs of the same settings with different seeds, in sequence, resumable as a whole."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainspan_loop.state.run_folder import RunFolder
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.home import make_home, runs_dir

__all__ = ["SeedSeries", "with_seed"]


def with_seed(settings: Settings, offset: int) -> Settings:
    """The settings with `offset` added to both seeds (task draws, training)."""
    return dataclasses.replace(
        settings,
        loop=dataclasses.replace(settings.loop, seed=settings.loop.seed + offset),
        train=dataclasses.replace(settings.train, seed=settings.train.seed + offset),
    )


class SeedSeries:
    """`runs/series-<time>.json`: the run of each seed. A finished run is not repeated on resume."""

    def __init__(self, path: Path, settings: Settings, seeds: int) -> None:
        self.path = path
        self._settings = settings
        self._seeds = seeds

    @classmethod
    def open(cls, settings: Settings, seeds: int, *, resume: bool) -> "SeedSeries":
        """Opens a new series, or with `resume` the newest, if it is unfinished with the same settings and number of seeds."""
        make_home()
        runs_dir().mkdir(exist_ok=True)
        known = sorted(runs_dir().glob("series-*.json"))
        if resume and known:
            series = cls(known[-1], settings, seeds)
            record = series._read()
            if record["settings"] == _plain(settings) and record["seeds"] == seeds and record["status"] == "running":
                return series
        series = cls(runs_dir() / f"series-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.json", settings, seeds)
        series._write({"settings": _plain(settings), "seeds": seeds, "status": "running", "runs": {}})
        return series

    def unfinished(self) -> Iterator[tuple[Settings, RunFolder]]:
        """The remaining runs with their settings; each is created when its turn comes."""
        for offset in range(self._seeds):
            settings = with_seed(self._settings, offset)
            name = str(settings.loop.seed)
            runs = self._read()["runs"]
            if name in runs:
                folder = RunFolder(runs_dir() / runs[name])
            else:
                folder = RunFolder.create(dataclasses.asdict(settings))
                self._write({**self._read(), "runs": {**runs, name: folder.run_id}})
            if folder.read("run.json").get("status") != "finished":
                yield settings, folder

    def runs(self) -> list[RunFolder]:
        """All started runs, by seed."""
        return [RunFolder(runs_dir() / run_id) for run_id in self._read()["runs"].values()]

    def finish(self) -> None:
        self._write({**self._read(), "status": "finished"})

    def _read(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.path.read_text())
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        RunFolder(self.path.parent).write(self.path.name, record)


def _plain(settings: Settings) -> Any:
    """The settings as read back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))

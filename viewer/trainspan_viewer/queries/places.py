"""Where the things are that the pages show: the store, the runs and the datasets of one state folder."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainspan_schemas.artifacts.dataset import dataset_dirs, round_of
from trainspan_schemas.artifacts.run_files import RunFiles
from trainspan_schemas.errors import TrainspanError

__all__ = ["DatasetPlace", "NotFoundError", "ViewerPaths"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,254}")
"""A longer one cannot be a file's name."""


class NotFoundError(TrainspanError, LookupError):
    """The address names nothing that is stored."""


@dataclass(frozen=True, slots=True)
class DatasetPlace:
    """One dataset on disk."""

    name: str
    """Its name in addresses: `RUN:round-0003`, or `round-0003` for one that was built outside of runs."""
    path: Path
    run_id: str | None


@dataclass(frozen=True, slots=True)
class ViewerPaths:
    """The store (a path or a grpc:// address) and the folders of runs and datasets. Names never lead out of these folders."""

    store: str
    runs: Path
    datasets: Path

    def all_runs(self) -> list[RunFiles]:
        """The runs, newest first."""
        found = self.runs.glob("*/run.json") if self.runs.is_dir() else []
        return [RunFiles(path.parent) for path in sorted(found, reverse=True)]

    def run(self, run_id: str) -> RunFiles:
        """Raises NotFoundError."""
        if _NAME.fullmatch(run_id) and (self.runs / run_id / "run.json").is_file():
            return RunFiles(self.runs / run_id)
        raise NotFoundError(f"no run {run_id!r} in {self.runs}")

    def run_named(self, name: str) -> RunFiles:
        """The run with this id or prefix of an id; `newest` is the newest. Raises NotFoundError."""
        found = [run for run in self.all_runs() if name == "newest" or run.run_id.startswith(name)]
        if not found:
            raise NotFoundError(f"no run {name!r} in {self.runs}")
        return found[0]

    def all_datasets(self) -> Iterator[DatasetPlace]:
        """The datasets of runs, the newest run first and its newest dataset first, then those outside of runs."""
        for run in self.all_runs():
            yield from self.datasets_of(run)
        for path in reversed(dataset_dirs(self.datasets)):
            yield DatasetPlace(path.name, path, None)

    def datasets_of(self, run: RunFiles) -> Iterator[DatasetPlace]:
        for path in reversed(dataset_dirs(run.datasets)):
            yield DatasetPlace(f"{run.run_id}:{path.name}", path, run.run_id)

    def dataset(self, name: str) -> DatasetPlace:
        """Raises NotFoundError."""
        run_id, colon, folder = name.rpartition(":")
        root = self.run(run_id).datasets if colon else self.datasets
        if _NAME.fullmatch(folder) and round_of(folder) is not None and (root / folder).is_dir():
            return DatasetPlace(name, root / folder, run_id or None)
        raise NotFoundError(f"no dataset {name!r}")

"""Where the things are that the pages show: the store, the runs and the datasets of one state folder."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainspan_schemas.artifacts.dataset import dataset_dirs, round_of
from trainspan_schemas.artifacts.run_files import RunFiles
from trainspan_schemas.errors import TrainspanError
from trainspan_schemas.home import policy_dir

__all__ = ["DatasetLocation", "NotFoundError", "ViewerPaths"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,254}")
"""A longer one cannot be a file's name."""


class NotFoundError(TrainspanError, LookupError):
    """The address names nothing that is stored."""


@dataclass(frozen=True, slots=True)
class DatasetLocation:
    """One dataset on disk."""

    name: str
    """Its name in addresses: `RUN:round-0003`, or `round-0003` for one that was built outside of runs; of one of several
    policies `RUN:POLICY:round-0003` or `:POLICY:round-0003`."""
    path: Path
    run_id: str | None
    policy: str | None = None

    @property
    def round(self) -> int:
        return round_of(self.path.name) or 0


@dataclass(frozen=True, slots=True)
class ViewerPaths:
    """The folders of runs and datasets. Names never lead out of these folders."""

    runs: Path
    datasets: Path

    def all_runs(self) -> list[RunFiles]:
        """The runs, newest first."""
        files = self.runs.glob("*/run.json") if self.runs.is_dir() else []
        return [RunFiles(path.parent) for path in sorted(files, reverse=True)]

    def run(self, run_id: str) -> RunFiles:
        """Raises NotFoundError."""
        if _NAME.fullmatch(run_id) and (self.runs / run_id / "run.json").is_file():
            return RunFiles(self.runs / run_id)
        raise NotFoundError(f"no run {run_id!r} in {self.runs}")

    def run_named(self, name: str) -> RunFiles:
        """The run with this id or prefix of an id; `newest` is the newest. Raises NotFoundError."""
        matching = [run for run in self.all_runs() if name == "newest" or run.run_id.startswith(name)]
        if not matching:
            raise NotFoundError(f"no run {name!r} in {self.runs}")
        return matching[0]

    def all_datasets(self) -> Iterator[DatasetLocation]:
        """The datasets of runs, the newest run first and its newest dataset first, then those outside of runs."""
        for run in self.all_runs():
            yield from self.datasets_of(run)
        yield from _places(None, self.datasets)

    def datasets_of(self, run: RunFiles) -> Iterator[DatasetLocation]:
        """The datasets of a run, the newest first."""
        return _places(run.run_id, run.datasets)

    def of_other_policies(self, location: DatasetLocation | None) -> list[DatasetLocation]:
        """The datasets of the same round of a run that other policies have."""
        if location is None or location.run_id is None or location.policy is None:
            return []
        of_run = self.datasets_of(self.run(location.run_id))
        return [other for other in of_run if other.round == location.round and other.policy != location.policy]

    def dataset(self, name: str) -> DatasetLocation:
        """Raises NotFoundError."""
        run_id, policy, folder = _parts(name)
        root = policy_dir(self.run(run_id).datasets if run_id else self.datasets, policy)
        is_name = policy is None or _NAME.fullmatch(policy)
        if is_name and _NAME.fullmatch(folder) and round_of(folder) is not None and (root / folder).is_dir():
            return DatasetLocation(name, root / folder, run_id, policy)
        raise NotFoundError(f"no dataset {name!r}")


def _places(run_id: str | None, root: Path) -> Iterator[DatasetLocation]:
    """The datasets in a folder and in those of policies in it, the newest first."""
    inside = root.iterdir() if root.is_dir() else ()
    policies = sorted(path.name for path in inside if path.is_dir() and _NAME.fullmatch(path.name))
    folders = [(path, policy) for policy in (None, *policies) for path in dataset_dirs(policy_dir(root, policy))]
    for path, policy in sorted(folders, key=lambda folder: -(round_of(folder[0].name) or 0)):
        parts = [run_id or ""] if run_id or policy else []
        yield DatasetLocation(":".join([*parts, *([policy] if policy else []), path.name]), path, run_id, policy)


def _parts(name: str) -> tuple[str | None, str | None, str]:
    """Run, policy and folder of a dataset's name."""
    *where, folder = name.rsplit(":", 2)
    run_id, policy = where if len(where) > 1 else (where[0] if where else None, None)
    return run_id or None, policy, folder

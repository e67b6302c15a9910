"""The list of datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_processing.dataset.published import open_published
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.errors import TrainspanError
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.paths import DatasetLocation
from trainspan_viewer.queries.sources import Sources

__all__ = ["MOST_DATASETS", "DatasetRow", "DatasetsModel", "load_datasets"]

MOST_DATASETS: Final = 200
_SHOWN: Final = ("rows", "rollouts", "rollouts_seen", "groups", "groups_seen", "rewards", "coverage", "dropped")


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A row of the list of datasets."""

    location: DatasetLocation
    manifest: Mapping[str, Any]
    """What the row shows of it; empty with an error."""
    error: str = ""
    """Why the dataset cannot be read."""


@dataclass(frozen=True, slots=True)
class DatasetsModel:
    """The page with all datasets."""

    datasets: Sequence[DatasetRow]
    n_datasets: int
    is_live: bool
    """Whether a run is in progress."""
    params: Params


def load_datasets(sources: Sources, params: Params) -> DatasetsModel:
    """The newest datasets."""
    locations = [location for location in sources.paths.all_datasets() if manifest_path(location.path).exists()]
    rows = [_row(location) for location in locations[:MOST_DATASETS]]
    is_live = any(run.is_held() for run in sources.paths.all_runs()[:MOST_DATASETS])
    return DatasetsModel(rows, len(locations), is_live, params)


def _row(location: DatasetLocation) -> DatasetRow:
    try:
        manifest = open_published(location.path).manifest
        return DatasetRow(location, {name: manifest[name] for name in _SHOWN})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, TrainspanError) as error:
        return DatasetRow(
            location, {}, f"cannot be read: {error if isinstance(error, TrainspanError) else repr(error)}"[:300]
        )

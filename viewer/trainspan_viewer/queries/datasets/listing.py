"""The list of datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainspan_processing.dataset.published import open_published
from trainspan_schemas.artifacts.dataset import manifest_path
from trainspan_schemas.errors import TrainspanError
from trainspan_viewer.queries.params import Params
from trainspan_viewer.queries.places import DatasetPlace
from trainspan_viewer.queries.sources import Sources

__all__ = ["MOST_DATASETS", "DatasetRow", "DatasetsModel", "load_datasets"]

MOST_DATASETS: Final = 200
_SHOWN: Final = ("rows", "rollouts", "rollouts_seen", "groups", "groups_seen", "rewards", "coverage", "dropped")


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A row of the list of datasets."""

    place: DatasetPlace
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
    places = [place for place in sources.places.all_datasets() if manifest_path(place.path).exists()]
    rows = [_row(place) for place in places[:MOST_DATASETS]]
    is_live = any(run.is_held() for run in sources.places.all_runs()[:MOST_DATASETS])
    return DatasetsModel(rows, len(places), is_live, params)


def _row(place: DatasetPlace) -> DatasetRow:
    try:
        manifest = open_published(place.path).manifest
        return DatasetRow(place, {name: manifest[name] for name in _SHOWN})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, TrainspanError) as error:
        return DatasetRow(
            place, {}, f"cannot be read: {error if isinstance(error, TrainspanError) else repr(error)}"[:300]
        )

"""What every loader of a model gets: where things are, a reader of the stores, and the settings."""

from dataclasses import dataclass

from trainspan_schemas.config.settings import Settings
from trainspan_viewer.queries.paths import ViewerPaths
from trainspan_viewer.queries.store import StoreReader

__all__ = ["Sources"]


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of all models, shared by all requests."""

    paths: ViewerPaths
    store: StoreReader
    settings: Settings
    """Those of `trainspan.toml`, for example the rule of credit that a rollout without a dataset is explained with."""

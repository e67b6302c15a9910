"""One dataset: its groups and rollouts with filters, and why calls were dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.dataset.diff import Difference, compare_datasets
from trainspan_processing.dataset.published import Published, open_published
from trainspan_schemas.artifacts.manifest import DatasetManifest
from trainspan_viewer.queries.datasets.filters import Filters, filters_of, passing
from trainspan_viewer.queries.datasets.listing import MOST_DATASETS
from trainspan_viewer.queries.datasets.members import (
    DatasetMember,
    Group,
    as_groups,
    as_members,
    members_of,
    sorted_groups,
    sorted_rollouts,
)
from trainspan_viewer.queries.params import Params, Part
from trainspan_viewer.queries.paths import DatasetLocation
from trainspan_viewer.queries.sources import Sources

__all__ = ["DatasetModel", "load_dataset"]

_PAGE: Final = 50
_SORTS: Final = ("spread", "reward", "least reward", "tokens", "task")
_VIEWS: Final = ("groups", "rollouts", "quality", "diff")


@dataclass(frozen=True, slots=True)
class DatasetModel:
    """The page of a dataset."""

    location: DatasetLocation
    manifest: DatasetManifest
    view: str
    views: Sequence[str]
    filters: Filters
    sorts: Sequence[str]
    sort: str
    groups: Sequence[Group]
    rollouts: Sequence[DatasetMember]
    part: Part
    """Of the groups, or rollouts, that the filters leave."""
    agents: Sequence[str]
    kinds: Sequence[str]
    finishes: Sequence[str]
    reward_range: tuple[float, float]
    notes: Sequence[str]
    """What the filters could not do."""
    others: Sequence[str]
    difference: Difference | None
    other: str
    params: Params


def load_dataset(sources: Sources, params: Params) -> DatasetModel:
    """Raises NotFoundError, UsageError, or DatasetError for a damaged dataset."""
    location = sources.paths.dataset(params.text("dataset"))
    published = open_published(location.path)
    filters = filters_of(params)
    view = params.choice("view", _VIEWS, "groups")
    sort = params.choice("sort", _SORTS, "spread")
    with_tokens = view == "rollouts" or sort == "tokens" or filters.least_tokens is not None
    all_members = members_of(published, with_tokens=with_tokens or filters.most_tokens is not None)
    notes: list[str] = []
    members = (
        passing(sources, location, published, all_members, filters, notes)
        if view in ("groups", "rollouts")
        else all_members
    )
    start = params.integer("from", 0)
    groups: list[Group] = []
    rollouts: list[DatasetMember] = []
    n_found = members.height
    if view == "groups":
        # A group's figures are those of all its rollouts, whichever of them pass the filters.
        table = sorted_groups(all_members, sort).filter(pl.col("key").is_in(members["key"].unique().implode()))
        n_found = table.height
        groups = as_groups(table.slice(start, _PAGE), all_members)
    elif view == "rollouts":
        rollouts = as_members(sorted_rollouts(members, sort).slice(start, _PAGE))
    other = params.text("other")
    difference = compare_datasets(published, _other(sources, other)) if view == "diff" and other else None
    rewards = all_members["reward"].drop_nulls()
    least, most = (float(rewards.min()), float(rewards.max())) if len(rewards) else (0.0, 1.0)  # type: ignore[arg-type]
    return DatasetModel(
        location=location,
        manifest=published.manifest,
        view=view,
        views=_VIEWS,
        filters=filters,
        sorts=_SORTS,
        sort=sort,
        groups=groups,
        rollouts=rollouts,
        part=Part(start, _PAGE, n_found),
        agents=all_members["agents"].explode().drop_nulls().unique().sort().head(100).to_list(),
        kinds=all_members["kinds"].explode().drop_nulls().unique().sort().to_list(),
        finishes=all_members["finish"].explode().drop_nulls().unique().sort().head(20).to_list(),
        reward_range=(least, most),
        notes=notes,
        others=[item.name for item in sources.paths.all_datasets() if item.name != location.name][:MOST_DATASETS]
        if view == "diff"
        else [],
        difference=difference,
        other=other,
        params=params,
    )


def _other(sources: Sources, name: str) -> Published:
    return open_published(sources.paths.dataset(name).path)

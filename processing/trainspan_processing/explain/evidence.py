"""Everything found about one rollout, before it is described: frames of the dataset step, and the spans' attributes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from trainspan_processing.branches.stored_branches import StoredBranch
from trainspan_processing.dataset.published import Published
from trainspan_processing.explain.dry_run import DryRun
from trainspan_processing.read.measurements import Measurement
from trainspan_processing.reasons.missing_calls import Lack
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["Evidence", "Key", "SpanText", "seconds"]

Key = tuple[str, str]
"""(trace_id, span_id)."""


@dataclass(frozen=True, slots=True)
class SpanText:
    """A span with all its attributes."""

    name: str
    start_ns: int
    end_ns: int | None
    failed: bool
    error: str | None
    """The message of its status."""
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about one rollout."""

    rollout: Mapping[str, Any]
    """Its row of the rollout table with reward and reason."""
    calls: pl.DataFrame
    """Its calls from `decided`, with final reasons and joined with TOKENS."""
    rows: pl.DataFrame | None
    """Its rows, as in a dataset."""
    decided: DryRun
    traces: TraceIndex
    texts: Mapping[Key, SpanText]
    tools: pl.DataFrame
    """TOOL_USES of it."""
    settings: DatasetSettings
    explanations: Mapping[tuple[str | None, float | None, str | None, int], str] = field(default_factory=dict)
    """Name, score, source and time_ns of an evaluation of this rollout → the reason that its sender gave."""
    dataset: Published | None = None
    """The dataset in question."""
    agrees: bool | None = None
    """Whether that dataset's rows of the rollout equal `rows`."""
    unlike: int = 0
    """Number of rollouts compared by the dataset that are missing in the stores or have a different reward there."""
    lacks: list[Lack] = field(default_factory=list)
    """Missing pieces, if it is unfinished."""
    measured: Mapping[Key, list[Measurement]] = field(default_factory=dict)
    """What branches measured about its calls, as the store is now."""
    branches: list[StoredBranch] = field(default_factory=list)
    """Its branches, as the store is now."""

    def own(self, frame: pl.DataFrame) -> pl.DataFrame:
        """This rollout's rows of `frame`."""
        rollout = self.rollout
        return frame.filter((pl.col("rollout_id") == rollout["rollout_id"]) & (pl.col("attempt") == rollout["attempt"]))

    @property
    def call_index(self) -> dict[Key, int]:
        """Span → index, for each of its calls."""
        columns = ["trace_id", "span_id", "call_index"]
        return {(row[0], row[1]): row[2] for row in self.calls.select(columns).iter_rows()}


def seconds(start_ns: int, end_ns: int | None) -> float | None:
    """Seconds between two times; None if the second is unknown."""
    return None if end_ns is None else (end_ns - start_ns) / 1e9

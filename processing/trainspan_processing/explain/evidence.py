"""What was found of one rollout before it is told: frames of the dataset step, and the spans' own words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from trainspan_processing.dataset.published import Published
from trainspan_processing.explain.dry_run import DryRun
from trainspan_processing.reasons.missing_calls import Lack
from trainspan_processing.traces.trace_index import TraceIndex
from trainspan_schemas.settings import DatasetSettings

__all__ = ["Evidence", "Key", "SpanText", "seconds"]

Key = tuple[str, str]
"""(trace_id, span_id)."""


@dataclass(frozen=True, slots=True)
class SpanText:
    """A span with all that it says."""

    name: str
    start_ns: int
    end_ns: int | None
    failed: bool
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one rollout."""

    rollout: dict[str, Any]
    """Its row of the rollout table with reward and reason."""
    calls: pl.DataFrame
    """Its calls of the decided with final reasons, joined with TOKENS."""
    rows: pl.DataFrame | None
    """Its rows, as a dataset has them."""
    decided: DryRun
    traces: TraceIndex
    texts: Mapping[Key, SpanText]
    settings: DatasetSettings
    dataset: Published | None = None
    """The dataset that was asked about."""
    agrees: bool | None = None
    """Whether that dataset's rows of the rollout are `rows`."""
    unlike: int = 0
    """How many of the rollouts that it compared are not in the stores, or have another reward there."""
    lacks: list[Lack] = field(default_factory=list)
    """What is missing, if it is unfinished."""

    def own(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows of `frame` that are this rollout's."""
        rollout = self.rollout
        return frame.filter((pl.col("rollout_id") == rollout["rollout_id"]) & (pl.col("attempt") == rollout["attempt"]))

    @property
    def call_index(self) -> dict[Key, int]:
        """Index of each of its calls, by span."""
        columns = ["trace_id", "span_id", "call_index"]
        return {(row[0], row[1]): row[2] for row in self.calls.select(columns).iter_rows()}


def seconds(start_ns: int, end_ns: int | None) -> float | None:
    """From one time to another; None where the second is unknown."""
    return None if end_ns is None else (end_ns - start_ns) / 1e9

"""What lies outside of the rollouts that are indexed and decides on them all the same: spans of no rollout, other chunks."""

from dataclasses import dataclass, field, replace

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import CALLS, EVALUATIONS, SPAN_KEY, SPANS, empty
from trainspan_processing.traces.evaluations import read_feedback
from trainspan_processing.traces.server_calls import CALL_COLUMNS, narrow_calls
from trainspan_processing.traces.spans import narrow_spans

__all__ = ["ChunkContext", "read_context"]


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """Nothing, where the selection is indexed as a whole."""

    spans: pl.DataFrame = field(default_factory=lambda: empty(SPANS))
    """SPANS that belong to no rollout: agents above a call, or what a client recorded of it in another trace."""
    calls: pl.DataFrame = field(default_factory=lambda: empty(CALLS))
    """CALLS that belong to no rollout."""
    evaluations: pl.DataFrame = field(default_factory=lambda: empty(EVALUATIONS))
    """EVALUATIONS that belong to no rollout that there is."""
    feedback: pl.DataFrame | None = None
    """Late feedback on responses (evaluations.py), where it was read for all chunks."""
    covered: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=dict.fromkeys(SPAN_KEY, pl.String)))
    """The keys of those of `spans` that calls of other chunks are known to cover."""
    served: frozenset[str] = frozenset()
    """Names of models that calls of other chunks were made to."""
    are_counted: bool = True
    """Whether these calls are this index's to count, or another chunk's."""

    def near(self, spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
        """Those of the spans that may say something of `calls`: of their traces, or naming a response."""
        if self.are_counted or self.spans.is_empty():
            return self.spans
        traces = pl.concat([spans["trace_id"], calls["trace_id"]]).unique()
        names_response = pl.col("is_client_call") & pl.col("response_id").is_not_null()
        return self.spans.filter(names_response | pl.col("trace_id").is_in(traces.implode()))


def read_context(source: Source, selection: Selection) -> ChunkContext:
    """Those of a selection that is read by rollout ids."""
    alone = replace(selection, rollout_ids=None, without_rollout=True)
    return ChunkContext(
        spans=narrow_spans(source, alone),
        calls=narrow_calls(source.read("calls", alone, CALL_COLUMNS)),
        feedback=read_feedback(source),
    )

"""Data outside the current chunk that still affects it: spans without a rollout, and calls in other chunks."""

from dataclasses import dataclass, field, replace

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import CALLS, EVALUATIONS, SPAN_KEY, SPANS, empty
from trainspan_processing.traces.evaluations import CLAIMS, read_feedback
from trainspan_processing.traces.spans import read_spans

__all__ = ["ChunkContext", "read_context"]


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """The context of a chunk; empty if the selection is indexed as a whole."""

    spans: pl.DataFrame = field(default_factory=lambda: empty(SPANS))
    """SPANS without a rollout: agents above a call, or a client's record of a call in another trace."""
    calls: pl.DataFrame = field(default_factory=lambda: empty(CALLS))
    """CALLS without a rollout."""
    evaluations: pl.DataFrame = field(default_factory=lambda: empty(EVALUATIONS))
    """EVALUATIONS without a known rollout."""
    feedback: pl.DataFrame | None = None
    """Late feedback on responses (evaluations.py), if it was read for all chunks."""
    claims: pl.DataFrame = field(default_factory=lambda: empty(CLAIMS))
    """CLAIMS of other chunks on these responses."""
    covered: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=dict.fromkeys(SPAN_KEY, pl.String)))
    """The keys of `spans` that calls of other chunks are known to cover."""
    served: frozenset[str] = frozenset()
    """Names of the models that calls of other chunks used."""
    are_counted: bool = True
    """Whether this index counts these calls; otherwise another chunk does."""

    def near(self, spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
        """The spans that may describe `calls`: spans of their traces, and spans that name a response."""
        if self.are_counted or self.spans.is_empty():
            return self.spans
        traces = pl.concat([spans["trace_id"], calls["trace_id"]]).unique()
        names_response = pl.col("is_client_call") & pl.col("response_id").is_not_null()
        return self.spans.filter(names_response | pl.col("trace_id").is_in(traces.implode()))


def read_context(source: Source, selection: Selection) -> ChunkContext:
    """Reads the context of a selection that is read by rollout ids."""
    alone = replace(selection, rollout_ids=None, without_rollout=True)
    spans, calls, _ = read_spans(source, alone)
    return ChunkContext(spans=spans, calls=calls, feedback=read_feedback(source))

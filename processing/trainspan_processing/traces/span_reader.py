"""Reads the spans of a selection in one pass: those with tokens are calls."""

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.traces.server_calls import CALL_COLUMNS, join_calls, narrow_calls
from trainspan_processing.traces.spans import SPAN_COLUMNS, join_spans, narrow_spans

__all__ = ["read_spans"]

_COLUMNS = list(dict.fromkeys(("is_call", *SPAN_COLUMNS, *CALL_COLUMNS)))


def read_spans(source: Source, selection: Selection) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The spans of a selection as frames SPANS (those without tokens) and CALLS, each once, in no particular order."""
    spans: list[pl.DataFrame] = []
    calls: list[pl.DataFrame] = []
    for batch in source.read("spans", selection, _COLUMNS):
        is_call = pl.col("is_call").fill_null(value=False)
        spans.append(narrow_spans(batch.filter(~is_call)))
        calls.append(narrow_calls(batch.filter(is_call)))
    return join_spans(source, spans), join_calls(calls)

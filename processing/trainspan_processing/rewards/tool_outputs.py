"""Outputs of tools in the trace, as far as rules of automatic intermediate rewarding look at them."""

from collections.abc import Iterator, Sequence
from typing import Final

import polars as pl

from trainspan_processing.read.json_attributes import text
from trainspan_processing.read.source import Source
from trainspan_processing.tables import SPAN_KEY
from trainspan_schemas.errors import UsageError

__all__ = ["OUTPUT", "check_pattern", "matching_outputs"]

OUTPUT: Final = "output:"
"""Rules that begin so name a regular expression (Rust's syntax) for which tool outputs are searched."""

_RESULT: Final = ("gen_ai.tool.call.result", "traceloop.entity.output", "output.value")
_MATCHED: Final = {"rule": pl.String, "trace_id": pl.String, "span_id": pl.String}


def check_pattern(rule: str) -> None:
    """Raises UsageError if the rule's pattern is empty or no regular expression."""
    pattern = rule.removeprefix(OUTPUT)
    try:
        if not pattern:
            raise UsageError(f"air has {rule!r} without a pattern: write {OUTPUT}not found=-0.1")
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError as error:
        raise UsageError(f"air has {rule!r}, whose pattern is no regular expression: {error}") from error


def _tool_outputs(source: Source, spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """trace_id, span_id and `output` of the tool calls among `spans` (SPANS) that recorded one, in batches."""
    tools = spans.filter("is_tool")
    for batch in source.attributes(tools) if tools.height else ():
        output = pl.coalesce([text(name) for name in _RESULT])
        yield batch.select(*SPAN_KEY, output.alias("output")).drop_nulls("output")


def matching_outputs(source: Source, spans: pl.DataFrame, rules: Sequence[str]) -> pl.DataFrame:
    """`rule`, trace_id and span_id of the tool calls whose output matches a rule's pattern; the source is read if there is one."""
    patterns = [rule for rule in rules if rule.startswith(OUTPUT)]
    matches = [pl.DataFrame(schema=_MATCHED)]
    for batch in _tool_outputs(source, spans) if patterns else ():
        for rule in patterns:
            matched = batch.filter(pl.col("output").str.contains(rule.removeprefix(OUTPUT)))
            matches.append(matched.select(pl.lit(rule).alias("rule"), *SPAN_KEY))
    return pl.concat(matches)

"""Automatic intermediate rewarding: signals in the trace as rewards of single calls. LightningRL, arXiv 2508.03680, sec. 3.

Off unless rules are given, each with the score of one occurrence: `tool_error=-0.1,parse_error=-0.05,repeated_call=-0.05`.
A rule `output:PATTERN` occurs if a tool's output matches the regular expression.
The reward goes to the call whose answer asked for the tool, by the id that it gave the tool call. Where no record has the id, it goes
to the latest call that came back under the same parent before the step began. If it is unclear which one that is, the rollout has it
(binding.py).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import polars as pl

from trainspan_processing.rewards.binding import UNCLEAR
from trainspan_processing.rewards.preceding_call import preceding_call
from trainspan_processing.tables import EDGES, ROLLOUT_KEY, SPAN_KEY, Schema, empty
from trainspan_processing.traces.call_matching import CallMatches
from trainspan_schemas.errors import UsageError

__all__ = ["AIR", "air_edges", "air_rules"]

AIR: Final = "air"
"""The name of these rewards."""
_OUTPUT: Final = "output:"
"""Rules that begin so name a regular expression (Rust's syntax) for which tool outputs are searched."""

_SCORES: Final[Schema] = {"rule": pl.String, "score": pl.Float64}
_PARSING: Final = r"(?i)json|pars|validat|decod"
_PARSE_ERROR: Final = "parse_error"

_OF_TOOLS: Final[Mapping[str, pl.Expr]] = {
    "tool_error": pl.col("failed"),
    _PARSE_ERROR: pl.col("failed") & pl.coalesce("error", "result").str.contains(_PARSING).fill_null(value=False),
    "repeated_call": pl.col("arguments").is_not_null()
    & ~pl.struct(*ROLLOUT_KEY, "name", "arguments").is_first_distinct(),
}
"""Rule → condition on TOOL_USES: a tool call that failed; one that failed because something could not be parsed; a tool called again
with the same input in the same rollout. Other steps that failed so are parse errors too."""


def air_rules(text: str | None) -> dict[str, float]:
    """The rules of the setting `air`. Raises UsageError if a rule is unknown or has no number."""
    rules: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, score = item.rpartition("=") if "=" in item else (item, "", "")
        if name.startswith(_OUTPUT):
            _check_pattern(name)
        elif name not in _OF_TOOLS:
            known = ", ".join(_OF_TOOLS)
            raise UsageError(f"air = {text!r}: unknown rule {name!r}; rules are {known} and {_OUTPUT}PATTERN")
        try:
            rules[name] = float(score)
        except ValueError:
            raise UsageError(f"air = {text!r}: {item!r} has no score; write {name}=-0.1") from None
    return rules


def _check_pattern(rule: str) -> None:
    """Raises UsageError if the rule's pattern is empty or no regular expression."""
    pattern = rule.removeprefix(_OUTPUT)
    try:
        if not pattern:
            raise UsageError(f"air has {rule!r} without a pattern: write {_OUTPUT}not found=-0.1")
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError as error:
        raise UsageError(f"air has {rule!r}, whose pattern is no regular expression: {error}") from error


def air_edges(
    rules: Mapping[str, float], calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches, uses: pl.DataFrame
) -> pl.DataFrame:
    """EDGES with name `air` and rule `air:NAME`, one per occurrence; a signal before any call is ignored. `uses` are TOOL_USES."""
    if not rules:
        return empty(EDGES)
    known = _of_known_calls(rules, uses)
    signals = pl.concat([known, _of_steps(rules, calls, spans, matches, uses)]).sort("time_ns", "order", "rule")
    scores = pl.DataFrame({"rule": list(rules), "score": list(rules.values())}, schema=_SCORES)
    edges = scores.with_row_index("place").join(signals, on="rule", maintain_order="left_right")
    edges = edges.with_columns(
        pl.when("is_unclear").then(pl.lit(UNCLEAR)).otherwise(pl.format("air:{}", "rule")).alias("rule"),
        pl.lit(AIR).alias("name"),
        pl.lit("trace").alias("source"),
    )
    return edges.select(pl.col(column).cast(kind) for column, kind in EDGES.items())


def _occurrences(names: Collection[str], uses: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """Each of the rules with the TOOL_USES in which it occurs."""
    for name in names:
        pattern = pl.col("result").str.contains(name.removeprefix(_OUTPUT)).fill_null(value=False)
        yield name, uses.filter(pattern if name.startswith(_OUTPUT) else _OF_TOOLS[name])


def _signals(rule: str, of_rule: pl.DataFrame) -> pl.DataFrame:
    return of_rule.select(
        pl.lit(rule).alias("rule"),
        *ROLLOUT_KEY,
        "call_trace_id",
        "call_span_id",
        "is_unclear",
        pl.col("start_ns").alias("time_ns"),
        "order",
    )


def _of_known_calls(rules: Collection[str], uses: pl.DataFrame) -> pl.DataFrame:
    """Signals of the tool calls whose model's call is known, or that have no span to find it by; `order` is their place."""
    uses = uses.with_row_index("order").with_columns(
        pl.coalesce("start_ns", "seen_ns").alias("start_ns"), pl.col("call_span_id").is_null().alias("is_unclear")
    )
    direct = pl.col("call_span_id").is_not_null() | pl.col("span_id").is_null()
    return pl.concat(
        [_signals("", uses.clear()), *(_signals(rule, of.filter(direct)) for rule, of in _occurrences(rules, uses))]
    )


def _of_steps(
    rules: Collection[str], calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches, uses: pl.DataFrame
) -> pl.DataFrame:
    """Signals of other steps, whose call is found by the trace: tool calls without it, and steps that are no tools."""
    steps = spans.filter(pl.col("rollout_id").is_not_null() & ~pl.col("is_client_call") & pl.col("status").is_null())
    steps = steps.with_columns(pl.col("attempt").fill_null(0)).sort("start_ns", *SPAN_KEY).with_row_index("row")
    located = [
        steps.join(of.filter(pl.col("call_span_id").is_null()), on=SPAN_KEY, how="semi").select(
            "row", pl.lit(rule).alias("rule")
        )
        for rule, of in _occurrences(rules, uses)
    ]
    if _PARSE_ERROR in rules:
        cannot_parse = pl.col("failed") & pl.col("error_type").str.contains(_PARSING).fill_null(value=False)
        located.append(
            steps.filter(~pl.col("is_tool") & cannot_parse).select("row", pl.lit(_PARSE_ERROR).alias("rule"))
        )
    occurrences = pl.concat(located)
    rows = steps.join(occurrences, on="row", how="semi").with_columns(
        pl.col("start_ns").alias("finished_ns"),
        pl.col("end_ns").alias("span_end_ns"),
        pl.col("last_call").alias("last_call_before_span"),
        # A call under the step's own span was made after the step began.
        *(pl.lit(None, dtype=pl.String).alias(name) for name in ("of", "span_id")),
    )
    found = (
        rows.join(preceding_call(rows, calls, spans, matches), on="row", how="inner")
        .join(occurrences, on="row")
        .with_columns(
            pl.col("step_call_trace").alias("call_trace_id"),
            pl.col("step_call_span").alias("call_span_id"),
            pl.col("row").alias("order"),
        )
    )
    return pl.concat(
        [
            _signals("", found.clear()),
            *(_signals(str(rule), of) for (rule,), of in found.partition_by("rule", as_dict=True).items()),
        ]
    )

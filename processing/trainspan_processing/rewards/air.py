"""Automatic intermediate rewarding: signals in the trace as rewards of single calls. LightningRL, arXiv 2508.03680, sec. 3.

Off unless rules are given, each with the score of one occurrence: `tool_error=-0.1,parse_error=-0.05,repeated_call=-0.05`.
A rule `output:PATTERN` occurs if a tool's output matches the regular expression.
The reward goes to the latest call that came back under the same parent before the step began: the call that requested it. If it is
unclear which one that is, the rollout has it (binding.py).
"""

from collections.abc import Collection, Mapping
from typing import Final

import polars as pl

from trainspan_processing.rewards.binding import UNCLEAR
from trainspan_processing.rewards.preceding_call import preceding_call
from trainspan_processing.rewards.tool_outputs import OUTPUT, check_pattern
from trainspan_processing.tables import EDGES, ROLLOUT_KEY, SPAN_KEY, Schema, empty
from trainspan_processing.traces.call_matching import CallMatches
from trainspan_schemas.errors import UsageError

__all__ = ["AIR", "RULES", "air_edges", "air_rules"]

AIR: Final = "air"
"""The name of these rewards."""

_SCORES: Final[Schema] = {"rule": pl.String, "score": pl.Float64}
_PARSING: Final = r"(?i)json|pars|validat|decod"

RULES: Final[Mapping[str, pl.Expr]] = {
    "tool_error": pl.col("is_tool") & pl.col("failed"),
    "parse_error": pl.col("failed") & pl.col("error_type").str.contains(_PARSING).fill_null(False),
    "repeated_call": pl.col("is_tool")
    & pl.col("tool_signature").is_not_null()
    & ~pl.struct(*ROLLOUT_KEY, "tool_signature").is_first_distinct(),
}
"""Rule → condition on spans (SPANS, in the order of their start): a tool call that failed; a step that failed because something
could not be parsed; a tool called again with the same input in the same rollout."""


def air_rules(text: str | None) -> dict[str, float]:
    """The rules of the setting `air`. Raises UsageError if a rule is unknown or has no number."""
    rules: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, score = item.rpartition("=") if "=" in item else (item, "", "")
        if name.startswith(OUTPUT):
            check_pattern(name)
        elif name not in RULES:
            raise UsageError(f"air = {text!r}: unknown rule {name!r}; rules are {', '.join(RULES)} and {OUTPUT}PATTERN")
        try:
            rules[name] = float(score)
        except ValueError:
            raise UsageError(f"air = {text!r}: {item!r} has no score; write {name}=-0.1") from None
    return rules


def air_edges(
    rules: Mapping[str, float], calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches, outputs: pl.DataFrame
) -> pl.DataFrame:
    """EDGES with name `air` and rule `air:NAME`, one per occurrence; a signal before any call is ignored.

    `outputs` are the tool calls whose output matches a pattern (`matching_outputs`).
    """
    if not rules:
        return empty(EDGES)
    signals = _signals(rules, calls, spans, matches, outputs)
    scores = pl.DataFrame({"rule": list(rules), "score": list(rules.values())}, schema=_SCORES)
    edges = scores.with_row_index("order").join(signals, on="rule", maintain_order="left_right")
    edges = edges.with_columns(
        pl.when("is_unclear").then(pl.lit(UNCLEAR)).otherwise(pl.format("air:{}", "rule")).alias("rule"),
        pl.lit(AIR).alias("name"),
        pl.lit("trace").alias("source"),
    )
    return edges.select(pl.col(column).cast(kind) for column, kind in EDGES.items())


def _signals(
    names: Collection[str], calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches, outputs: pl.DataFrame
) -> pl.DataFrame:
    """`rule`, rollout_id, attempt, call_trace_id, call_span_id, `is_unclear` (then without a call) and time_ns of each occurrence
    of a rule, by its time.

    Rules are those of RULES with these names, and those of `outputs` (`rule` and SPAN_KEY of tool calls).
    """
    plain = {name: condition for name, condition in RULES.items() if name in names}
    steps = spans.filter(pl.col("rollout_id").is_not_null() & ~pl.col("is_client_call") & pl.col("status").is_null())
    steps = steps.with_columns(pl.col("attempt").fill_null(0)).sort("start_ns", "trace_id", "span_id")
    steps = steps.with_columns(condition.alias(name) for name, condition in plain.items()).with_row_index("row")
    by_rule = [steps.filter(name).select("row", pl.lit(name).alias("rule")) for name in plain]
    matched = steps.select("row", *SPAN_KEY).join(outputs, on=SPAN_KEY).select("row", "rule")
    occurrences = pl.concat([*by_rule, matched])
    rows = steps.join(occurrences, on="row", how="semi").with_columns(
        pl.col("start_ns").alias("finished_ns"),
        pl.col("end_ns").alias("span_end_ns"),
        pl.col("last_call").alias("last_call_before_span"),
        # A call under the step's own span was made after the step began.
        *(pl.lit(None, dtype=pl.String).alias(name) for name in ("of", "span_id")),
    )
    return (
        rows.join(preceding_call(rows, calls, spans, matches), on="row", how="inner")
        .join(occurrences, on="row")
        .sort("row", "rule")
        .select(
            "rule",
            *ROLLOUT_KEY,
            pl.col("step_call_trace").alias("call_trace_id"),
            pl.col("step_call_span").alias("call_span_id"),
            "is_unclear",
            pl.col("start_ns").alias("time_ns"),
        )
    )

"""Which call or rollout an evaluation belongs to: the binding rule.

An evaluation belongs to
- `rollout`: it says so, has no span, or is on the rollout's or a process's own span;
- `response`: it names the response of a call; `call`: it is on a call span; `twin`: on the client's span of a call;
- `step`: it is on any other span, and a call under that span, else under the span's parent, finished before it: the latest
  such call. Times are the client's own, so that a skew between machines changes nothing;
- `fallback`: none of these: the rollout.
"""

from typing import Final

import polars as pl

from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.call_matching import CallMatches

__all__ = ["bind", "latest_finished"]


_TARGETS: Final = {
    "response": ("trace_id", "span_id"),
    "call": ("trace_id", "span_id"),
    "twin": ("twin_call_trace", "twin_call_span"),
    "step": ("step_call_trace", "step_call_span"),
}


def bind(evaluations: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches) -> pl.DataFrame:
    """EDGES, one per evaluation; `evaluations` are EVALUATIONS with attempt and `of`."""
    named = evaluations.select(SPAN_KEY)
    own = spans.join(named, on=SPAN_KEY, how="semi").select(
        *SPAN_KEY,
        "parent_span_id",
        pl.col("end_ns").alias("span_end_ns"),
        (
            pl.col("status").is_not_null() | pl.col("boundary").is_not_null() | pl.col("stated_calls").is_not_null()
        ).alias("is_process"),
    )
    call_of_twin = matches.links.join(named, on=SPAN_KEY, how="semi").rename(
        {"call_trace_id": "twin_call_trace", "call_span_id": "twin_call_span"}
    )
    is_call = calls.select(SPAN_KEY).join(named, on=SPAN_KEY, how="semi").with_columns(pl.lit(True).alias("is_call"))
    rows = (
        evaluations.with_row_index("row")
        .join(own, on=SPAN_KEY, how="left")
        .join(is_call, on=SPAN_KEY, how="left")
        .join(call_of_twin, on=SPAN_KEY, how="left")
        .with_columns(pl.col("is_process", "is_call").fill_null(False))
    )
    to_rollout = (
        (pl.col("of").fill_null("") == "rollout")
        | pl.col("span_id").is_null()
        | (pl.col("is_process") & (pl.col("of").fill_null("") != "call"))
    )
    at = pl.min_horizontal("time_ns", "span_end_ns").alias("finished_ns")
    elsewhere = rows.filter(
        ~to_rollout & ~pl.col("is_call") & pl.col("twin_call_span").is_null() & pl.col("response_id").is_null()
    )
    rows = rows.join(latest_finished(elsewhere.with_columns(at), calls, matches), on="row", how="left")
    rule = (
        pl.when(pl.col("response_id").is_not_null())
        .then(pl.lit("response"))
        .when(to_rollout)
        .then(pl.lit("rollout"))
        .when("is_call")
        .then(pl.lit("call"))
        .when(pl.col("twin_call_span").is_not_null())
        .then(pl.lit("twin"))
        .when(pl.col("step_call_span").is_not_null())
        .then(pl.lit("step"))
        .otherwise(pl.lit("fallback"))
    )

    def target(part: int) -> pl.Expr:
        chosen = pl.lit(None, dtype=pl.String)
        for name, pair in _TARGETS.items():
            chosen = pl.when(pl.col("rule") == name).then(pl.col(pair[part])).otherwise(chosen)
        return chosen

    return rows.with_columns(rule.alias("rule")).select(
        *ROLLOUT_KEY,
        "rule",
        target(0).alias("call_trace_id"),
        target(1).alias("call_span_id"),
        "name",
        "score",
        "source",
        "time_ns",
    )


def latest_finished(rows: pl.DataFrame, calls: pl.DataFrame, matches: CallMatches) -> pl.DataFrame:
    """For each of `rows` the latest call under its span, else under its span's parent, that finished before `finished_ns`.

    `rows` have row, rollout_id, attempt, trace_id, span_id, parent_span_id and finished_ns (NULL: unknown span).
    Returns row, `step_call_trace`, `step_call_span` of those that have such a call.
    """
    calls = calls.join(rows, on=ROLLOUT_KEY, how="semi", nulls_equal=True)
    finished = (
        calls.join(matches.calls, on=SPAN_KEY, how="left")
        .select(
            *ROLLOUT_KEY,
            pl.col("trace_id").alias("step_call_trace"),
            pl.col("span_id").alias("step_call_span"),
            pl.coalesce("twin_trace_id", "trace_id").alias("scope_trace"),
            pl.when(pl.col("twin_span_id").is_not_null())
            .then("twin_parent_id")
            .otherwise("parent_span_id")
            .alias("scope_span"),
            pl.coalesce("twin_end_ns", "end_ns").alias("finished_ns"),
        )
        .drop_nulls(["scope_span", "finished_ns"])
        .sort("finished_ns", "step_call_span")
    )
    seen = rows.filter(pl.col("span_end_ns").is_not_null()).select(
        "row", *ROLLOUT_KEY, pl.col("trace_id").alias("scope_trace"), "span_id", "parent_span_id", "finished_ns"
    )
    by = [*ROLLOUT_KEY, "scope_trace", "scope_span"]
    found = [
        seen.select("row", *ROLLOUT_KEY, "scope_trace", pl.col(scope).alias("scope_span"), "finished_ns")
        .drop_nulls("scope_span")
        .sort("finished_ns")
        .join_asof(finished, on="finished_ns", by=by, strategy="backward", check_sortedness=False)
        .filter(pl.col("step_call_span").is_not_null())
        .select("row", "step_call_trace", "step_call_span")
        for scope in ("span_id", "parent_span_id")
    ]
    return pl.concat(found).unique("row", keep="first", maintain_order=True)

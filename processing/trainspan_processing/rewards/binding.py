"""Binds each evaluation to a call or a rollout by a binding rule.

The first rule that applies decides:
- `response`: it names the response of a call: that call;
- `rollout`: it states so, has no span, or is on the rollout's or a process's own span: the rollout;
- `call`: it is on a call span: that call;
- `client_call`: it is on the client's span of a call: that call;
- `step`: it is on any other span, and a call under that span, else under the span's parent, finished before it: the latest
  such call. Times are taken from the client, so that clock skew between machines has no effect;
- `fallback`: none of these: the rollout.
"""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.call_matching import CallMatches

__all__ = ["bind", "latest_finished"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """Binds an evaluation for which `holds` is true to the call with this key, or, without a key, to the rollout."""

    name: str
    holds: pl.Expr
    key: tuple[str, str] | None


_OF: Final = pl.col("of").fill_null("")
_DIRECT: Final = (
    _Rule("response", pl.col("response_id").is_not_null(), ("trace_id", "span_id")),
    _Rule("rollout", (_OF == "rollout") | pl.col("span_id").is_null() | (pl.col("is_process") & (_OF != "call")), None),
    _Rule("call", pl.col("is_call"), ("trace_id", "span_id")),
    _Rule("client_call", pl.col("described_call_span").is_not_null(), ("described_call_trace", "described_call_span")),
)
_RULES: Final = (
    *_DIRECT,
    _Rule("step", pl.col("step_call_span").is_not_null(), ("step_call_trace", "step_call_span")),
    _Rule("fallback", pl.lit(True), None),
)


def bind(evaluations: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches) -> pl.DataFrame:
    """EDGES, one per evaluation; `evaluations` are EVALUATIONS with attempt and `of`."""
    rows = _with_spans(evaluations, calls, spans, matches)
    at = pl.min_horizontal("time_ns", "span_end_ns").alias("finished_ns")
    elsewhere = rows.filter(~pl.any_horizontal(rule.holds for rule in _DIRECT)).with_columns(at)
    rows = rows.join(latest_finished(elsewhere, calls, matches), on="row", how="left")
    name, trace_id, span_id = (pl.lit(None, dtype=pl.String) for _ in range(3))
    for rule in reversed(_RULES):
        chosen = pl.when(rule.holds)
        name = chosen.then(pl.lit(rule.name)).otherwise(name)
        trace_id, span_id = (
            chosen.then(pl.col(rule.key[part]) if rule.key else pl.lit(None, dtype=pl.String)).otherwise(otherwise)
            for part, otherwise in enumerate((trace_id, span_id))
        )
    return rows.select(
        *ROLLOUT_KEY,
        name.alias("rule"),
        trace_id.alias("call_trace_id"),
        span_id.alias("call_span_id"),
        "name",
        "score",
        "source",
        "time_ns",
    )


def _with_spans(
    evaluations: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches
) -> pl.DataFrame:
    """Evaluations, numbered by `row`, with the kind of their span: a process, a call, or the client's span of a call."""
    named = evaluations.select(SPAN_KEY)
    said = (pl.col(name).is_not_null() for name in ("status", "boundary", "stated_calls"))
    own = spans.join(named, on=SPAN_KEY, how="semi").select(
        *SPAN_KEY,
        "parent_span_id",
        pl.col("end_ns").alias("span_end_ns"),
        pl.any_horizontal(said).alias("is_process"),
    )
    described = matches.links.join(named, on=SPAN_KEY, how="semi").rename(
        {"call_trace_id": "described_call_trace", "call_span_id": "described_call_span"}
    )
    is_call = calls.select(SPAN_KEY).join(named, on=SPAN_KEY, how="semi").with_columns(pl.lit(True).alias("is_call"))
    return (
        evaluations.with_row_index("row")
        .join(own, on=SPAN_KEY, how="left")
        .join(is_call, on=SPAN_KEY, how="left")
        .join(described, on=SPAN_KEY, how="left")
        .with_columns(pl.col("is_process", "is_call").fill_null(False))
    )


def latest_finished(rows: pl.DataFrame, calls: pl.DataFrame, matches: CallMatches) -> pl.DataFrame:
    """For each of `rows`, the latest call under its span, else under its span's parent, that finished before `finished_ns`.

    `rows` have row, rollout_id, attempt, trace_id, span_id, parent_span_id and finished_ns (NULL: unknown span).
    Returns row, `step_call_trace`, `step_call_span` of the rows with such a call.
    """
    calls = calls.join(rows, on=ROLLOUT_KEY, how="semi", nulls_equal=True)
    finished = (
        calls.join(matches.calls, on=SPAN_KEY, how="left")
        .select(
            *ROLLOUT_KEY,
            pl.col("trace_id").alias("step_call_trace"),
            pl.col("span_id").alias("step_call_span"),
            pl.coalesce("client_trace_id", "trace_id").alias("scope_trace"),
            pl.when(pl.col("client_span_id").is_not_null())
            .then("client_parent_id")
            .otherwise("parent_span_id")
            .alias("scope_span"),
            pl.coalesce("client_end_ns", "end_ns").alias("finished_ns"),
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

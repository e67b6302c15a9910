"""Finds the call that an agent's step follows: the latest call under a span, else under its parent, that came back before the step.

The agent and the policy server may have two clocks, so that a call's end and a step's time cannot be compared as they are:
- The agent's process may say which call had come back last (`last_call`). Calls are then compared with that one, in the order of
  the server. If that one is not stored, the answer is unclear.
- Otherwise the agent's own record says when a call came back: the client's span of the call or of its HTTP request, or the server's
  time if both are on one machine.
- A call of which neither is known is the preceding one only if it is the only one under the span, or the only one under a parent
  that is not the rollout's own span. In all other cases the answer is unclear.
"""

from typing import Final

import polars as pl

from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_processing.traces.call_matching import CallMatches

__all__ = ["preceding_call"]

_SCOPE: Final = [*ROLLOUT_KEY, "scope_trace", "scope_span"]
_CALL: Final = ["step_call_trace", "step_call_span"]


def preceding_call(rows: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, matches: CallMatches) -> pl.DataFrame:
    """row, `step_call_trace`, `step_call_span` and `is_unclear` of each of `rows` with such a call or with calls that it may be.

    `rows` have row, rollout_id, attempt, trace_id, span_id, parent_span_id, finished_ns, span_end_ns (NULL: unknown span),
    `of`, `last_call` and `last_call_before_span` (of the span's own start, which holds if no call is under it).
    """
    if rows.is_empty():
        return rows.select("row", *(pl.lit(None, pl.String).alias(name) for name in _CALL), is_unclear=False)
    of_rollouts = calls.join(rows, on=ROLLOUT_KEY, how="semi", nulls_equal=True, maintain_order="left")
    calls = _scoped(of_rollouts, matches)
    scopes = _scopes(rows, calls).join(_steps(spans), on=["scope_trace", "scope_span"], how="left")
    claims = _with_last_call(rows, scopes, calls)
    causal = _after_last_call(claims.drop_nulls("last_trace"), calls)
    timed = _by_time(rows.join(claims, on="row", how="anti"), scopes, calls)
    nothing = (pl.lit(None, dtype=pl.String).alias(name) for name in _CALL)
    lost = claims.filter(pl.col("last_trace").is_null()).select("row", *nothing, pl.lit(value=True).alias("is_unclear"))
    return pl.concat([causal, timed, lost])


def _scoped(calls: pl.DataFrame, matches: CallMatches) -> pl.DataFrame:
    """CALLS with their key as _CALL, the span that they were made under, and `returned_ns`, when they came back by the agent's clock
    (NULL: unknown). A client's record without a server is in the agent's own time."""
    is_matched = pl.col("client_span_id").is_not_null()
    is_comparable = pl.col("same_clock").fill_null(value=False) | pl.col("server").is_null()
    return calls.join(matches.calls, on=SPAN_KEY, how="left", maintain_order="left").select(
        *ROLLOUT_KEY,
        *(pl.col(key).alias(name) for key, name in zip(SPAN_KEY, _CALL, strict=True)),
        pl.coalesce("client_trace_id", "trace_id").alias("scope_trace"),
        pl.when(is_matched)
        .then("client_parent_id")
        .otherwise(pl.coalesce("request_parent_id", "parent_span_id"))
        .alias("scope_span"),
        pl.coalesce("client_end_ns", "request_end_ns", pl.when(is_comparable).then("end_ns")).alias("returned_ns"),
        "end_ns",
        pl.coalesce("response_id", "span_id").alias("answer"),
    )


def _scopes(rows: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """row and rank (0: the row's span, 1: its parent) of the scopes that have calls, with `requests` and `unknown`, the numbers of
    requests and of calls without `returned_ns`, and the first call as _CALL."""
    of_scope = (
        calls.drop_nulls("scope_span")
        .group_by(_SCOPE, maintain_order=True)
        .agg(
            pl.col("answer").n_unique().alias("requests"),
            pl.col("returned_ns").null_count().alias("unknown"),
            pl.col(*_CALL).first(),
        )
    )
    asked = pl.concat(
        rows.filter(pl.col("span_end_ns").is_not_null()).select(
            "row",
            *ROLLOUT_KEY,
            pl.col("trace_id").alias("scope_trace"),
            pl.col(name).alias("scope_span"),
            pl.lit(rank, dtype=pl.UInt8).alias("rank"),
        )
        for rank, name in enumerate(("span_id", "parent_span_id"))
    )
    return asked.join(of_scope, on=_SCOPE, how="inner", nulls_equal=True)


def _steps(spans: pl.DataFrame) -> pl.DataFrame:
    """scope_trace, scope_span and `is_step` of the spans that are not a rollout's or a process's own."""
    is_own = pl.any_horizontal(pl.col("status", "boundary", "stated_calls").is_not_null())
    return spans.filter(~is_own).select(
        pl.col("trace_id").alias("scope_trace"), pl.col("span_id").alias("scope_span"), pl.lit(True).alias("is_step")
    )


def _with_last_call(rows: pl.DataFrame, scopes: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """The rows that name their last call, with its end as `last_end_ns` by the server's clock and its key and scope, NULL if it is
    not stored."""
    around = scopes.filter(pl.col("rank") == 0).select("row", pl.lit(value=True).alias("is_around"))
    before = pl.when(pl.col("is_around").is_null()).then("last_call_before_span")
    claims = rows.join(around, on="row", how="left").with_columns(pl.coalesce("last_call", before).alias("last_call"))
    last = calls.select(
        *ROLLOUT_KEY,
        pl.col("step_call_span").alias("last_call"),
        pl.col("step_call_trace").alias("last_trace"),
        pl.col("end_ns").alias("last_end_ns"),
        pl.col("scope_trace").alias("last_scope_trace"),
        pl.col("scope_span").alias("last_scope_span"),
    ).unique([*ROLLOUT_KEY, "last_call"], keep="first", maintain_order=True)
    return claims.drop_nulls("last_call").join(last, on=[*ROLLOUT_KEY, "last_call"], how="left", nulls_equal=True)


def _after_last_call(known: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """The result for the rows of `_with_last_call`."""
    ended = calls.drop_nulls(["scope_span", "end_ns"]).sort("end_ns", "step_call_span")
    parts = []
    for scope in ("span_id", "parent_span_id"):
        asked = known.select(
            "row",
            *ROLLOUT_KEY,
            pl.col("trace_id").alias("scope_trace"),
            pl.col(scope).alias("scope_span"),
            pl.col("last_end_ns").alias("end_ns"),
            *("last_trace", "last_call", "last_scope_trace", "last_scope_span"),
        ).drop_nulls(["scope_span", "end_ns"])
        is_last = (pl.col("last_scope_trace") == pl.col("scope_trace")) & (
            pl.col("last_scope_span") == pl.col("scope_span")
        )
        nearest = asked.sort("end_ns").join_asof(
            ended.select(*_SCOPE, "end_ns", *_CALL), on="end_ns", by=_SCOPE, strategy="backward", check_sortedness=False
        )
        parts.append(
            nearest.with_columns(
                pl.when(is_last).then("last_trace").otherwise("step_call_trace").alias("step_call_trace"),
                pl.when(is_last).then("last_call").otherwise("step_call_span").alias("step_call_span"),
            )
            .drop_nulls("step_call_span")
            .select("row", *_CALL)
        )
    outside = known.filter(pl.col("of").fill_null("") == "call").select(
        "row", pl.col("last_trace").alias("step_call_trace"), pl.col("last_call").alias("step_call_span")
    )
    first = pl.concat([*parts, outside]).unique("row", keep="first", maintain_order=True)
    return first.with_columns(pl.lit(value=False).alias("is_unclear"))


def _by_time(rows: pl.DataFrame, scopes: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """The result for the other rows, by the agent's clock."""
    returned = calls.drop_nulls(["scope_span", "returned_ns"]).sort("returned_ns", "step_call_span")
    seen = rows.filter(pl.col("span_end_ns").is_not_null())
    parts = []
    for rank, scope in enumerate(("span_id", "parent_span_id")):
        asked = seen.select(
            "row",
            *ROLLOUT_KEY,
            pl.col("trace_id").alias("scope_trace"),
            pl.col(scope).alias("scope_span"),
            pl.col("finished_ns").alias("returned_ns"),
        ).drop_nulls("scope_span")
        of_scope = scopes.filter(pl.col("rank") == rank).select(
            *("row", "requests", "unknown", "is_step"),
            pl.col("step_call_trace").alias("only_trace"),
            pl.col("step_call_span").alias("only_span"),
        )
        nearest = (
            asked.sort("returned_ns")
            .join_asof(
                returned.select(*_SCOPE, "returned_ns", *_CALL),
                on="returned_ns",
                by=_SCOPE,
                strategy="backward",
                check_sortedness=False,
            )
            .join(of_scope, on="row", how="inner")
        )
        is_only = (pl.col("requests") == 1) & (pl.lit(rank == 0) | pl.col("is_step").fill_null(value=False))
        is_known = pl.col("unknown") == 0
        parts.append(
            nearest.select(
                "row",
                pl.when(is_known).then("step_call_trace").when(is_only).then("only_trace").alias("step_call_trace"),
                pl.when(is_known).then("step_call_span").when(is_only).then("only_span").alias("step_call_span"),
                (~is_known & ~is_only).alias("is_unclear"),
            ).filter(pl.col("is_unclear") | pl.col("step_call_span").is_not_null())
        )
    return pl.concat(parts).unique("row", keep="first", maintain_order=True)

"""Matches the policy server's calls with the client spans that describe them.

A call's match is the outermost client call span among its ancestors, else the client call span with its response id. If it has
none, the client's span of its HTTP request, as instrumentations of HTTP clients make them, says when it came back.
"""

from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.tables import SPAN_KEY

__all__ = ["CallMatches", "match_calls", "response_stem", "without_wrappers"]

_MAX_DEPTH: Final = 64
_CHOICE_SUFFIX: Final = r"[-_]\d{1,3}$"
"""vLLM's completions and responses append the choice's number to the id that a client sees."""


@dataclass(frozen=True, slots=True)
class CallMatches:
    """The matches of calls and client spans."""

    calls: pl.DataFrame
    """(trace_id, span_id) of a call with `client_trace_id, client_span_id, client_parent_id, client_end_ns` of its match,
    `request_parent_id, request_end_ns` of its HTTP request if it has no match, and `ancestor_agent`, the agent name of the
    nearest ancestor that has one; only calls with any of these."""
    links: pl.DataFrame
    """(trace_id, span_id) of each client call span that describes a call of the server, with that call's `call_trace_id` and
    `call_span_id`; the first call if there are several."""


def response_stem(column: str = "response_id") -> pl.Expr:
    """A response's id without the choice's number."""
    return pl.col(column).str.replace(_CHOICE_SUFFIX, "")


def without_wrappers(spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """SPANS in which no Langfuse generation with a model call below it counts as a call: it may be any function around calls."""
    generations = spans.filter("is_generation")
    if generations.is_empty():
        return spans
    traces = generations["trace_id"].unique().implode()
    above = [*SPAN_KEY, "parent_span_id"]
    parents = spans.filter(pl.col("trace_id").is_in(traces)).select(above)
    below = spans.filter(pl.col("is_client_call") | pl.col("is_bare_call"))
    level = pl.concat([below.select(above), calls.select(above)]).filter(pl.col("trace_id").is_in(traces))
    reached = level.clear().select(SPAN_KEY)
    while not level.is_empty():
        next_ids = level.drop_nulls("parent_span_id").select("trace_id", pl.col("parent_span_id").alias("span_id"))
        next_ids = next_ids.unique().join(reached, on=SPAN_KEY, how="anti")
        reached = pl.concat([reached, next_ids])
        level = parents.join(next_ids, on=SPAN_KEY, how="semi")
    wrappers = generations.select(SPAN_KEY).join(reached, on=SPAN_KEY, how="semi")
    is_wrapper = pl.col("is_wrapper").fill_null(False)
    return (
        spans.join(wrappers.with_columns(is_wrapper=True), on=SPAN_KEY, how="left", maintain_order="left")
        .with_columns(
            pl.col("is_client_call") & ~is_wrapper,
            pl.col("is_generation") & ~is_wrapper,
            pl.when(~is_wrapper).then(pl.col("model", "response_id")).name.keep(),
        )
        .drop("is_wrapper")
    )


def match_calls(calls: pl.DataFrame, spans: pl.DataFrame) -> CallMatches:
    """Matches CALLS with SPANS by ancestry, then by response id."""
    spans = spans.join(calls.select(SPAN_KEY), on=SPAN_KEY, how="anti")
    numbered = calls.with_row_index("row")
    above = numbered.select("row", "trace_id", pl.col("parent_span_id").alias("span_id"))
    ancestors = _ancestors(above, spans)
    client_calls = ancestors.filter("is_client_call")
    by_ancestry = client_calls.group_by("row").agg(pl.all().sort_by("depth").last())
    by_response = _by_response_id(numbered.join(by_ancestry, on="row", how="anti"), spans)
    elsewhere = by_response.select(
        "row", pl.col("client_trace_id").alias("trace_id"), pl.col("client_span_id").alias("span_id")
    )
    ancestors = pl.concat([ancestors, _ancestors(elsewhere, spans)])
    client_columns = ["row", "client_trace_id", "client_span_id", "client_parent_id", "client_end_ns"]
    matches = pl.concat([by_ancestry.select(client_columns), by_response.select(client_columns)])
    agents = (
        ancestors.filter(pl.col("agent").is_not_null())
        .group_by("row")
        .agg(pl.col("agent").sort_by("depth").first().alias("ancestor_agent"))
    )
    requests = _requests(ancestors.join(matches, on="row", how="anti"), numbered)
    linked = (
        calls.select(SPAN_KEY)
        .with_row_index("row")
        .join(matches, on="row", how="left")
        .join(agents, on="row", how="left")
        .join(requests, on="row", how="left")
        .filter(pl.any_horizontal(pl.col("client_span_id", "ancestor_agent", "request_end_ns").is_not_null()))
        .drop("row")
    )
    client_key = ["row", "client_trace_id", "client_span_id"]
    same_response = _same_response(numbered, spans).select(client_key)
    pairs = pl.concat([client_calls.select(client_key), by_response.select(client_key), same_response])
    links = (
        pairs.sort("row")
        .unique(["client_trace_id", "client_span_id"], keep="first", maintain_order=True)
        .join(numbered.select("row", *SPAN_KEY), on="row")
        .select(
            pl.col("client_trace_id").alias("trace_id"),
            pl.col("client_span_id").alias("span_id"),
            pl.col("trace_id").alias("call_trace_id"),
            pl.col("span_id").alias("call_span_id"),
        )
    )
    return CallMatches(linked, links)


def _ancestors(starts: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """One row per start (row, trace_id, span_id) and per span at or above it that is a client call, names its agent or is a request.

    `depth` counts from 0 at the start.
    """
    lookup = spans.select(
        "trace_id",
        "span_id",
        "parent_span_id",
        "is_client_call",
        "is_request",
        pl.when(pl.col("is_agent") | pl.col("is_client_call")).then(pl.col("agent")).alias("agent"),
        "end_ns",
    )
    frontier = starts
    levels = []
    for depth in range(_MAX_DEPTH):
        level = frontier.join(lookup, on=SPAN_KEY, how="inner")
        is_relevant = pl.col("is_client_call") | pl.col("is_request") | pl.col("agent").is_not_null()
        levels.append(level.filter(is_relevant).with_columns(pl.lit(depth, dtype=pl.UInt8).alias("depth")))
        frontier = level.filter(pl.col("parent_span_id").is_not_null()).select(
            "row", "trace_id", pl.col("parent_span_id").alias("span_id")
        )
        if frontier.is_empty():
            break
    return pl.concat(levels).rename(
        {
            "trace_id": "client_trace_id",
            "span_id": "client_span_id",
            "parent_span_id": "client_parent_id",
            "end_ns": "client_end_ns",
        }
    )


def _requests(ancestors: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """row, `request_parent_id`, `request_end_ns` of the outermost of the request spans directly above a call.

    Instrumentations nest as HTTP clients do. A span with several requests below it is none of one request.
    """
    answer = calls.select("row", pl.coalesce("response_id", pl.col("row").cast(pl.String)).alias("answer"))
    requests = ancestors.filter("is_request").join(answer, on="row")
    key = ["client_trace_id", "client_span_id"]
    requests = requests.filter(pl.col("answer").n_unique().over(key) == 1).sort("row", "depth")
    is_direct = pl.col("depth") == pl.int_range(pl.len()).over("row")
    return (
        requests.filter(is_direct)
        .group_by("row")
        .agg(
            pl.col("client_parent_id").last().alias("request_parent_id"),
            pl.col("client_end_ns").last().alias("request_end_ns"),
        )
    )


def _same_response(calls: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Every client call span that names the response of a call (numbered `row`), even if another span is the call's match."""
    stems = calls.drop_nulls("response_id").select("row", response_stem().alias("stem")).unique("stem", keep="first")
    responses = spans.filter(pl.col("is_client_call") & pl.col("response_id").is_not_null()).select(
        response_stem().alias("stem"),
        pl.col("trace_id").alias("client_trace_id"),
        pl.col("span_id").alias("client_span_id"),
    )
    return stems.join(responses, on="stem", how="inner")


def _by_response_id(calls: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """The client call span with the same response id, for calls (numbered `row`) without a client call among their ancestors."""
    stem = response_stem().alias("stem")
    by_id = (
        spans.filter(pl.col("is_client_call") & pl.col("response_id").is_not_null())
        .sort("start_ns", *SPAN_KEY)
        .unique("response_id", keep="first", maintain_order=True)
        .select(
            stem,
            pl.col("trace_id").alias("client_trace_id"),
            pl.col("span_id").alias("client_span_id"),
            pl.col("parent_span_id").alias("client_parent_id"),
            pl.col("end_ns").alias("client_end_ns"),
        )
        .unique("stem", keep="first", maintain_order=True)
    )
    return calls.select("row", stem).join(by_id, on="stem", how="inner")

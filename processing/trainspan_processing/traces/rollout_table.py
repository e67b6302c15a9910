"""The rollout table, one row per (rollout, attempt): identity, status, and whether all its data has arrived."""

from collections.abc import Collection
from typing import Final

import polars as pl

from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY, Schema, empty
from trainspan_processing.traces.server_calls import request_key
from trainspan_processing.traces.trust import heard

__all__ = ["CLAIMED", "identified_spans", "ignored_claims", "open_client_calls", "rollout_table", "with_collisions"]

CLAIMED: Final[Schema] = {"rollout_id": pl.String, "claim": pl.String}
"""What is said of a rollout by someone who is not heard."""


_BOUNDARY_RANK = {"runner": 0, "explicit": 1, "request": 2, "process": 3}
_IDENTITY = ["task_id", "run_id", "round", "split"]
_TOLERANCE_NS = 1_000_000_000


def rollout_table(
    calls: pl.DataFrame,
    bare_calls: pl.DataFrame,
    spans: pl.DataFrame,
    covered: pl.DataFrame,
    served: Collection[str],
    vouched: pl.DataFrame,
    *,
    now_ns: int,
    settle_s: float,
) -> pl.DataFrame:
    """Rollouts from CALLS (ordered) and OTHERS that the policy server recorded without tokens, as far as they are heard, the spans of
    `identified_spans`, the client call spans that a call covers, the names of the served models, and VOUCHED.

    Only what is heard counts (traces/trust.py). A process without calls of its own, whose rollouts are blocks in it, is none. A time
    after the one at which the collector received it counts as that one.

    Columns: rollout_id, attempt, task_id, run_id, round, split, status, judge, group_size, `is_signed` (by its runner),
    `by_runner` (it has a runner's span), `root_untrusted` (of the rollout span), `own_reward` (the runner left the reward to the
    agent), trace_id and span_id of the rollout span, start_ns, end_ns (of the rollout span, else of its spans), service_name,
    n_calls (u32), `n_stored` (requests with or without tokens), `overstated` (its agent reported more calls than the policy servers
    began), `complete` (nothing is missing), `pending` (not complete, but its latest activity is more recent than
    `settle_s`), `superseded` (a later attempt exists), `conflicts` (two runs have its id and attempt).
    """
    silent_ns = now_ns - pl.col("last_ns")
    identified = spans.filter("is_heard")
    is_replaced = ((pl.col("boundary") == "process") & pl.col("status").is_null()).fill_null(value=False)
    replaced = identified.filter(is_replaced).select(*ROLLOUT_KEY, pl.lit(value=True).alias("is_replaced")).unique()
    return (
        _facts(calls, bare_calls, identified.lazy(), covered, served, vouched)
        .join(replaced.lazy(), on=ROLLOUT_KEY, how="left")
        .filter(pl.col("is_replaced").is_null() | (pl.col("n_requests") + pl.col("n_bare") > 0))
        .drop("is_replaced")
        .with_columns(_completeness().alias("complete"))
        .with_columns(
            (~pl.col("complete") & (silent_ns < int(settle_s * 1e9))).alias("pending"),
            (pl.col("attempt") < pl.col("attempt").max().over("rollout_id")).alias("superseded"),
            pl.coalesce(pl.min_horizontal("end_ns", "received_ns"), "last_ns").alias("end_ns"),
            pl.coalesce("start_ns", "first_ns").alias("start_ns"),
        )
        .drop(*("first_ns", "last_ns", "received_ns", "stated_elsewhere"))
        .with_columns((pl.col("n_requests") + pl.col("n_bare")).alias("n_stored"))
        .with_columns((pl.col("stated_calls") > pl.col("served_calls")).fill_null(False).alias("overstated"))
        .drop("n_requests", "n_bare", "n_missing", "served_calls", "stated_calls")
        .drop("expected", "counts_all", "open_with_id", "open_without_id", "has_rival", "has_strays", "root_signed")
        .sort(ROLLOUT_KEY)
        .collect(engine="in-memory")  # keeps the sorted order
    )


def _facts(
    calls: pl.DataFrame,
    bare_calls: pl.DataFrame,
    identified: pl.LazyFrame,
    covered: pl.DataFrame,
    served: Collection[str],
    vouched: pl.DataFrame,
) -> pl.LazyFrame:
    """The known facts of each rollout; counts are 0 if there is nothing to count."""
    owned = calls.lazy().filter(pl.col("rollout_id").is_not_null())
    roots = _rollout_spans(identified)
    return (
        _identities(owned, identified)
        .join(roots, on=ROLLOUT_KEY, how="left")
        .join(_strays(owned, identified, roots), on=ROLLOUT_KEY, how="left")
        .join(_stated_elsewhere(identified), on=ROLLOUT_KEY, how="left")
        .join(_call_counts(owned), on=ROLLOUT_KEY, how="left")
        .join(_bare_counts(bare_calls.lazy()), on=ROLLOUT_KEY, how="left")
        .join(_open_counts(identified, covered.lazy(), served), on=ROLLOUT_KEY, how="left")
        .join(vouched.lazy().rename({"signs": "is_signed"}), on="rollout_id", how="left")
        .with_columns(
            _expected_calls().alias("expected"),
            pl.col("by_runner", "own_reward", "is_signed").fill_null(False),
            (pl.col("has_rival") | pl.col("has_strays")).fill_null(False).alias("conflicts"),
            pl.col("n_calls", "n_requests", "n_bare", "n_missing", "open_with_id", "open_without_id").fill_null(0),
        )
    )


def _expected_calls() -> pl.Expr:
    """Returns how many calls there were; NULL if nobody counted.

    If the policy servers told the runner how many they began, that is it: an agent's own count could have its rollout left out.
    Otherwise it is how many the agent's side saw succeed; a runner's span counts those of all processes, any other one only those of its
    own process.
    """
    stated, elsewhere = (pl.col(name).cast(pl.Int64) for name in ("stated_calls", "stated_elsewhere"))
    return (
        pl.when(pl.col("by_runner").fill_null(False) & pl.col("served_calls").is_not_null())
        .then(pl.col("served_calls").cast(pl.Int64))
        .when(pl.col("counts_all").fill_null(False))
        .then(pl.coalesce(stated, elsewhere))
        .otherwise(pl.coalesce(stated + elsewhere, stated, elsewhere))
    )


def _completeness() -> pl.Expr:
    """Whether nothing of a rollout is missing.

    A rollout is complete if its own span is stored, if each server's call indexes have no gaps except for calls without
    tokens, if it has at least as many calls, with or without tokens, as the agent's side saw succeed, and if each of its client
    call spans has a call of the server. Only client calls that did not fail and that name a model of the policy server are
    considered: agents may talk to other models too.
    """
    # A client call without a response id may have failed in a way that its span does not show: it counts only if nobody
    # stated the number of calls.
    open_calls = pl.col("open_with_id") + pl.when(pl.col("expected").is_null()).then("open_without_id").otherwise(0)
    return (
        pl.col("status").is_not_null()
        & (pl.col("n_missing") <= pl.col("n_bare"))
        & (pl.col("n_requests") + pl.col("n_bare") >= pl.col("expected").fill_null(0))
        & (open_calls == 0)
    )


def identified_spans(spans: pl.DataFrame, vouched: pl.DataFrame) -> pl.DataFrame:
    """The SPANS of known rollouts, with their rollout and with `is_heard` and `is_unsigned` (VOUCHED)."""
    return heard(_with_rollout(spans.lazy()).collect(engine="in-memory"), vouched)


def ignored_claims(
    rollouts: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, covered: pl.DataFrame, served: Collection[str]
) -> pl.DataFrame:
    """CLAIMED of the ROLLOUTS of which someone says otherwise who is not heard; `spans` are those of `identified_spans`.

    `attempt`: there is another attempt; `status`: another own span; `calls`: more calls than are stored, or than the policy servers told
    the runner of; `open_calls`: a call with a response id that is not stored. They may be true, of an agent that is no cheat.
    """
    if spans["is_heard"].all() and calls["is_heard"].all() and not rollouts["overstated"].any():
        return empty(CLAIMED)
    unheard = spans.filter(~pl.col("is_heard"))
    others = calls.filter(~pl.col("is_heard")).select(ROLLOUT_KEY)
    counted = unheard.filter(pl.col("status").is_null()).group_by(ROLLOUT_KEY).agg(pl.col("stated_calls").sum())
    more = rollouts.join(counted, on=ROLLOUT_KEY, how="left").filter(
        pl.col("overstated") | (pl.col("stated_calls") > pl.col("n_stored")).fill_null(value=False)
    )
    is_open = open_client_calls(unheard.lazy(), covered.lazy(), served).collect(engine="in-memory")
    claims = {
        "attempt": pl.concat([unheard.select(ROLLOUT_KEY), others]).join(rollouts, on=ROLLOUT_KEY, how="anti"),
        "status": unheard.filter(pl.col("status").is_not_null()),
        "calls": more,
        "open_calls": is_open.filter(pl.col("response_id").is_not_null()),
    }
    frames = [frame.select("rollout_id", pl.lit(name).alias("claim")) for name, frame in claims.items()]
    return pl.concat(frames).unique().join(rollouts, on="rollout_id", how="semi")


def _with_rollout(spans: pl.LazyFrame) -> pl.LazyFrame:
    """Spans of known rollouts; a span without a rollout id is assigned to the only rollout of its trace, by the runner's own span if
    there is one, else by trusted spans if there are any."""
    is_trusted = ~pl.col("untrusted").fill_null(value=False)
    is_runners = ((pl.col("boundary") == "runner") & pl.col("status").is_not_null()).fill_null(value=False)
    standing = is_trusted.cast(pl.UInt8) + (is_trusted & is_runners).cast(pl.UInt8)
    of_trace = (
        spans.filter(pl.col("rollout_id").is_not_null())
        .select("trace_id", *ROLLOUT_KEY, standing.alias("standing"))
        .filter(pl.col("standing") == pl.col("standing").max().over("trace_id"))
        .drop("standing")
        .with_columns(pl.col("attempt").fill_null(0))
        .unique()
        .filter(pl.len().over("trace_id") == 1)
        .rename({"rollout_id": "trace_rollout", "attempt": "trace_attempt"})
    )
    return (
        spans.join(of_trace, on="trace_id", how="left")
        .with_columns(
            pl.coalesce("rollout_id", "trace_rollout").alias("rollout_id"),
            pl.when(pl.col("rollout_id").is_null())
            .then("trace_attempt")
            .otherwise(pl.col("attempt").fill_null(0))
            .alias("attempt"),
        )
        .filter(pl.col("rollout_id").is_not_null())
        .drop("trace_rollout", "trace_attempt")
    )


def _identities(calls: pl.LazyFrame, spans: pl.LazyFrame) -> pl.LazyFrame:
    """Every rollout with its identity (preferably from the rollout span) and the times of its first and last activity."""
    active_ns = pl.min_horizontal(pl.max_horizontal("start_ns", "end_ns"), "received_ns")
    statements = pl.concat(
        frame.group_by(*ROLLOUT_KEY, *_IDENTITY, rank.alias("rank")).agg(
            pl.col("start_ns").min(), active_ns.max().alias("last_ns")
        )
        for frame, rank in (
            (spans, pl.col("status").is_null().cast(pl.UInt8)),
            (calls, pl.lit(2, dtype=pl.UInt8)),
        )
    ).sort("rank", "start_ns", *_IDENTITY)
    return statements.group_by(ROLLOUT_KEY).agg(
        *(pl.col(name).drop_nulls().first() for name in _IDENTITY),
        pl.col("start_ns").min().alias("first_ns"),
        pl.col("last_ns").max(),
    )


def _rollout_spans(spans: pl.LazyFrame) -> pl.LazyFrame:
    """The rollout span of each rollout: the runner's before the agent's own."""
    rank = pl.col("boundary").replace_strict(_BOUNDARY_RANK, default=len(_BOUNDARY_RANK), return_dtype=pl.UInt8)
    facts = (
        *("status", "judge", "stated_calls", "served_calls", "group_size", "service_name"),
        *(*SPAN_KEY, "start_ns", "end_ns", "received_ns"),
    )
    is_runners = pl.col("boundary") == "runner"
    by_runner = (is_runners & ~pl.col("untrusted").fill_null(False)).fill_null(False)
    signed = (pl.col("is_signed") & is_runners).alias("root_signed")
    own_reward = by_runner & pl.col("judge").is_null() & pl.col("own_reward").fill_null(False)
    # Sent again under another id, it is in the same trace and begins at the same time.
    run = pl.struct("trace_id", "start_ns")
    alike = [*ROLLOUT_KEY, "boundary"]
    return (
        spans.filter(pl.col("status").is_not_null())
        .with_columns((run.n_unique().over(alike) > 1).alias("has_rival"))
        .sort(rank, "start_ns", *SPAN_KEY)
        .unique(ROLLOUT_KEY, keep="first", maintain_order=True)
        .select(
            *ROLLOUT_KEY,
            *facts,
            signed,
            by_runner.alias("by_runner"),
            own_reward.alias("own_reward"),
            is_runners.alias("counts_all"),
            pl.col("untrusted").fill_null(False).alias("root_untrusted"),
            "has_rival",
        )
    )


def _strays(calls: pl.LazyFrame, spans: pl.LazyFrame, roots: pl.LazyFrame) -> pl.LazyFrame:
    """`has_strays`: something in other traces than the rollout's own began before the rollout, so that another run made it.

    A run that was killed has no own span. The agent's spans are compared with the rollout's own by their clock, unless that is
    the runner's, and so are calls of agents on the server's machine. Other calls are compared with each other only: none of a run
    begins longer before its last one than the run lasted.
    """
    root_facts = roots.select(
        *ROLLOUT_KEY,
        pl.col("trace_id").alias("own_trace"),
        pl.col("start_ns").alias("begins_ns"),
        (pl.col("end_ns") - pl.col("start_ns")).alias("lasts_ns"),
        *("counts_all", pl.col("root_signed").fill_null(False)),
    )
    is_own = pl.col("trace_id") == pl.col("own_trace")
    of_spans = spans.join(root_facts.filter(~pl.col("counts_all").fill_null(False)), on=ROLLOUT_KEY).select(
        *ROLLOUT_KEY, (~is_own & (pl.col("start_ns") < pl.col("begins_ns") - _TOLERANCE_NS)).alias("has_strays")
    )
    last, first = pl.col("start_ns").filter(is_own).max(), pl.col("start_ns").filter(~is_own).min()
    is_too_early = (last - first > pl.col("lasts_ns").first() + _TOLERANCE_NS).fill_null(False)
    is_comparable = pl.col("same_clock").fill_null(False) & ~pl.col("counts_all").fill_null(False)
    # The rollout's own span may be from another machine than these calls, unless its own calls are from this one.
    tolerance = pl.when((is_own & is_comparable).any()).then(0).otherwise(_TOLERANCE_NS)
    began_before = (~is_own & is_comparable & (pl.col("start_ns") < pl.col("begins_ns") - tolerance)).any()
    of_calls = (
        calls.join(root_facts, on=ROLLOUT_KEY)
        .filter(~pl.col("root_signed") | pl.col("is_signed").fill_null(False))
        .group_by(ROLLOUT_KEY)
        .agg((is_too_early | began_before).alias("has_strays"))
    )
    both = pl.concat([of_spans, of_calls]).filter("has_strays")
    return both.select(*ROLLOUT_KEY, "has_strays").unique()


def _stated_elsewhere(spans: pl.LazyFrame) -> pl.LazyFrame:
    """The number of successful calls stated by the rollout's processes."""
    return (
        spans.filter(pl.col("status").is_null() & pl.col("stated_calls").is_not_null())
        .group_by(ROLLOUT_KEY)
        .agg(pl.col("stated_calls").sum().alias("stated_elsewhere"))
    )


def _call_counts(calls: pl.LazyFrame) -> pl.LazyFrame:
    """Numbers of calls, of requests (the choices of one are one), and of indexes missing below each server's highest."""
    counted = pl.col("counted_index").drop_nulls()
    of_server = calls.group_by(*ROLLOUT_KEY, "server").agg(
        pl.len().alias("n_calls"),
        request_key().n_unique().alias("n_requests"),
        (counted.max().cast(pl.Int64).fill_null(-1) + 1 - counted.n_unique().cast(pl.Int64)).alias("n_missing"),
    )
    return of_server.group_by(ROLLOUT_KEY).agg(pl.col("n_calls", "n_requests", "n_missing").sum())


def _bare_counts(bare_calls: pl.LazyFrame) -> pl.LazyFrame:
    key = pl.col("rollout_id"), pl.col("attempt").fill_null(0)
    return bare_calls.drop_nulls("rollout_id").group_by(key).agg(pl.len().alias("n_bare"))


def open_client_calls(spans: pl.LazyFrame, covered: pl.LazyFrame, served: Collection[str]) -> pl.LazyFrame:
    """Successful client calls (SPANS with their rollout) to the policy that have no matching call of the server."""
    is_call = pl.col("is_client_call") & ~pl.col("failed").fill_null(False) & pl.col("model").is_in(sorted(served))
    return spans.filter(is_call).join(covered, on=SPAN_KEY, how="anti")


def _open_counts(spans: pl.LazyFrame, covered: pl.LazyFrame, served: Collection[str]) -> pl.LazyFrame:
    """Open client calls of each rollout, with and without a response id."""
    return (
        open_client_calls(spans, covered, served)
        .group_by(ROLLOUT_KEY)
        .agg(
            pl.col("response_id").is_not_null().sum().alias("open_with_id"),
            pl.col("response_id").is_null().sum().alias("open_without_id"),
        )
    )


def with_collisions(rollouts: pl.DataFrame, calls: pl.DataFrame, collisions: pl.DataFrame) -> pl.DataFrame:
    """The rollout table with `collides`: its own span is in one of these traces or, if it has none, one of its CALLS is.

    Collisions of untrusted spans matter only if the rollout itself or its rewards are an agent's word: otherwise anyone who knows
    its trace could have it left out, and so could an agent that did badly.
    """
    if collisions.is_empty():
        return rollouts.with_columns(pl.lit(value=False).alias("collides"))
    traces = collisions["trace_id"].unique().implode()
    trusted = collisions.filter(~pl.col("untrusted"))["trace_id"].unique().implode()
    of_calls = calls.filter(pl.col("trace_id").is_in(traces))["rollout_id"].unique()
    heeds_all = (pl.col("root_untrusted") | pl.col("own_reward")).fill_null(value=False)
    root_collides = pl.col("trace_id").is_in(trusted) | (pl.col("trace_id").is_in(traces) & heeds_all)
    ownless = pl.col("trace_id").is_null() & pl.col("rollout_id").is_in(of_calls.implode())
    return rollouts.with_columns((root_collides.fill_null(value=False) | ownless).alias("collides"))

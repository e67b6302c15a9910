"""Binds evaluations to rollouts and calls, and sums them to rewards.

An evaluation belongs to
- `rollout`: it says so, has no span, or is on the rollout's or a process's own span;
- `call`: it is on a call span; `twin`: on the client's span of a call;
- `step`: it is on any other span, and a call under that span, else under the span's parent, finished before it: the latest
  such call. Times are the client's own, so that a skew between machines changes nothing;
- `fallback`: none of these: the rollout.
Evaluations of one target add up. A missing reward is NULL, never 0.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from trainspan_schemas import keys

from .frames import EVALUATIONS, ROLLOUT_KEY, SPAN_KEY, Schema, empty
from .twins import Twins

__all__ = ["EVALUATION_COLUMNS", "Rewards", "bind_rewards", "collect_evaluations"]

EVALUATION_COLUMNS: Final = list(EVALUATIONS)
"""Columns asked of the read `evaluations`."""

_WHAT: Final = ["trace_id", "span_id", "name", "score"]
_EVENTS: Final[Schema] = {
    "trace_id": pl.String,
    "span_id": pl.String,
    "name": pl.String,
    "score": pl.Float64,
    "event_source": pl.String,
    "of": pl.String,
}


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of one name."""

    edges: pl.DataFrame
    """One row per evaluation: rollout_id, attempt, `rule`, call_trace_id and call_span_id (NULL: the rollout), score."""
    unmatched: int
    """Evaluations that belong to no rollout at hand."""
    in_vain: int
    """Rollouts with a judge that also carry rewards of other sources, which do not count."""

    def of_rollouts(self) -> pl.DataFrame:
        """rollout_id, attempt, `rollout_reward`: the sum of what is bound to the rollout itself."""
        return (
            self.edges.filter(pl.col("call_span_id").is_null())
            .group_by(ROLLOUT_KEY)
            .agg(pl.col("score").sort().sum().alias("rollout_reward"))
        )

    def of_calls(self) -> pl.DataFrame:
        """trace_id, span_id, `reward`: the sum of what is bound to each call."""
        return (
            self.edges.filter(pl.col("call_span_id").is_not_null())
            .group_by(pl.col("call_trace_id").alias("trace_id"), pl.col("call_span_id").alias("span_id"))
            .agg(pl.col("score").sort().sum().alias("reward"))
        )


def collect_evaluations(batches: list[pl.DataFrame]) -> pl.DataFrame:
    """The read `evaluations` → frame EVALUATIONS; what two stores both hold counts once."""
    frames = [
        batch.select("store", *(pl.col(name).cast(kind) for name, kind in EVALUATIONS.items())) for batch in batches
    ]
    if not frames:
        return empty(EVALUATIONS)
    occurrence = pl.int_range(pl.len()).over("store", *EVALUATIONS).alias("occurrence")
    return pl.concat(frames).with_columns(occurrence).unique([*EVALUATIONS, "occurrence"]).select(*EVALUATIONS)


def bind_rewards(
    evaluations: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, twins: Twins, rollouts: pl.DataFrame, name: str
) -> Rewards:
    """Rewards called `name` from EVALUATIONS, for CALLS and the rollout table."""
    scored = evaluations.filter((pl.col("name") == name) & pl.col("score").is_finite())
    named = _with_attempt(scored, spans, rollouts)
    unmatched = scored.height - named.height
    named = _with_event_facts(named, spans).join(
        rollouts.select(
            *ROLLOUT_KEY,
            "judge",
            pl.col("trace_id").alias("root_trace_id"),
            pl.col("span_id").alias("root_span_id"),
        ),
        on=ROLLOUT_KEY,
        how="inner",
    )
    on_root = (pl.col("trace_id") == pl.col("root_trace_id")) & (pl.col("span_id") == pl.col("root_span_id"))
    counts = pl.col("judge").is_null() | (
        on_root.fill_null(False) & (pl.col("source") == "judge") & pl.col("event_source").eq_missing(pl.lit("judge"))
    )
    in_vain = named.filter(~counts)["rollout_id"].n_unique()
    edges = _bind(named.filter(counts), calls, spans, twins)
    return Rewards(edges, unmatched, in_vain)


def _with_attempt(evaluations: pl.DataFrame, spans: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Evaluations of known rollouts; the attempt is that of their trace, else the rollout's last."""
    of_trace = spans.select(
        "trace_id", "rollout_id", pl.col("attempt").fill_null(0).cast(pl.Int32).alias("trace_attempt")
    ).filter(pl.col("rollout_id").is_not_null())
    of_trace = of_trace.unique(["trace_id", "rollout_id"], keep="any").filter(
        pl.len().over("trace_id", "rollout_id") == 1
    )
    last = rollouts.group_by("rollout_id").agg(pl.col("attempt").max().alias("last_attempt"))
    return (
        evaluations.join(last, on="rollout_id", how="inner")
        .join(of_trace, on=["trace_id", "rollout_id"], how="left")
        .with_columns(pl.coalesce("trace_attempt", "last_attempt").alias("attempt"))
        .drop("trace_attempt", "last_attempt")
    )


def _with_event_facts(evaluations: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Adds what only the span event tells: `event_source` and `of`; NULL for evaluations that came as log records."""
    stored = spans.filter(pl.col("evaluation_events").is_not_null()).select(*SPAN_KEY, "evaluation_events")
    rows = [
        (trace_id, span_id, *_event_facts(attributes))
        for trace_id, span_id, text in stored.iter_rows()
        for attributes in _evaluation_attributes(text)
    ]
    events = pl.DataFrame(rows, schema=_EVENTS, orient="row").with_columns(
        pl.int_range(pl.len()).over(_WHAT).alias("occurrence")
    )
    return (
        evaluations.sort("time_ns", "source")
        .with_columns(pl.int_range(pl.len()).over(_WHAT).alias("occurrence"))
        .join(events, on=[*_WHAT, "occurrence"], how="left")
        .drop("occurrence")
    )


def _evaluation_attributes(events: str) -> list[dict[str, Any]]:
    """Attributes of the evaluation events in a span's `events` JSON."""
    return [event.get("attributes") or {} for event in json.loads(events) if event.get("name") == keys.EVALUATION_EVENT]


def _event_facts(attributes: dict[str, Any]) -> tuple[str | None, float | None, str, str | None]:
    """(name, score, source, of)."""
    score, of = attributes.get(keys.EVALUATION_SCORE), attributes.get(keys.EVALUATION_OF)
    return (
        attributes.get(keys.EVALUATION_NAME),
        float(score) if isinstance(score, (int, float)) else None,
        str(attributes.get(keys.EVALUATION_SOURCE, "agent")),
        of if isinstance(of, str) else None,
    )


def _bind(evaluations: pl.DataFrame, calls: pl.DataFrame, spans: pl.DataFrame, twins: Twins) -> pl.DataFrame:
    """One edge per evaluation."""
    own = spans.select(
        *SPAN_KEY,
        "parent_span_id",
        pl.col("end_ns").alias("span_end_ns"),
        (
            pl.col("status").is_not_null() | pl.col("boundary").is_not_null() | pl.col("stated_calls").is_not_null()
        ).alias("is_process"),
    )
    call_of_twin = twins.links.rename({"call_trace_id": "twin_call_trace", "call_span_id": "twin_call_span"})
    is_call = calls.select(*SPAN_KEY, pl.lit(True).alias("is_call"))
    rows = (
        evaluations.with_row_index("row")
        .join(own, on=SPAN_KEY, how="left")
        .join(is_call, on=SPAN_KEY, how="left")
        .join(call_of_twin, on=SPAN_KEY, how="left")
        .with_columns(pl.col("is_process", "is_call").fill_null(False))
    )
    rows = rows.join(_latest_finished(rows, calls, twins), on="row", how="left")
    to_rollout = (
        (pl.col("of").fill_null("") == "rollout")
        | pl.col("span_id").is_null()
        | (pl.col("is_process") & (pl.col("of").fill_null("") != "call"))
    )
    rule = (
        pl.when(to_rollout)
        .then(pl.lit("rollout"))
        .when("is_call")
        .then(pl.lit("call"))
        .when(pl.col("twin_call_span").is_not_null())
        .then(pl.lit("twin"))
        .when(pl.col("step_call_span").is_not_null())
        .then(pl.lit("step"))
        .otherwise(pl.lit("fallback"))
    )
    columns = {"call": ("trace_id", "span_id"), "twin": ("twin_call_trace", "twin_call_span")}
    columns["step"] = ("step_call_trace", "step_call_span")

    def target(part: int) -> pl.Expr:
        chosen = pl.lit(None, dtype=pl.String)
        for name, pair in columns.items():
            chosen = pl.when(pl.col("rule") == name).then(pl.col(pair[part])).otherwise(chosen)
        return chosen

    return rows.with_columns(rule.alias("rule")).select(
        *ROLLOUT_KEY,
        "rule",
        target(0).alias("call_trace_id"),
        target(1).alias("call_span_id"),
        "score",
        "source",
        "time_ns",
    )


def _latest_finished(rows: pl.DataFrame, calls: pl.DataFrame, twins: Twins) -> pl.DataFrame:
    """For each evaluation (numbered `row`) the latest call under its span, else under its span's parent, that finished
    before it: `step_call_trace`, `step_call_span`."""
    finished = (
        calls.join(twins.calls, on=SPAN_KEY, how="left")
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
        "row",
        *ROLLOUT_KEY,
        pl.col("trace_id").alias("scope_trace"),
        "span_id",
        "parent_span_id",
        pl.min_horizontal("time_ns", "span_end_ns").alias("finished_ns"),
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

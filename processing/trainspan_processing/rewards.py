"""Rewards: the evaluations of the chosen names, bound to rollouts and calls (binding.py), and their sums.

Evaluations of one name and one target add up. A missing reward is NULL, never 0.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from trainspan_schemas import keys

from .binding import EDGES, bind
from .frames import ROLLOUT_KEY, SPAN_KEY, Schema
from .twins import Twins

__all__ = ["Rewards", "bind_rewards"]

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
    """The rewards of the chosen names."""

    edges: pl.DataFrame
    """EDGES, one row per evaluation."""
    unmatched: int
    """Evaluations that belong to no rollout at hand."""
    in_vain: int
    """Rollouts with a judge that also carry rewards of other sources, which do not count."""

    def of_rollouts(self, name: str) -> pl.DataFrame:
        """rollout_id, attempt, `rollout_reward`: the sum of what is bound to the rollout itself."""
        return (
            self.edges.filter(pl.col("call_span_id").is_null() & (pl.col("name") == name))
            .group_by(ROLLOUT_KEY)
            .agg(pl.col("score").sort().sum().alias("rollout_reward"))
        )

    def of_calls(self, name: str) -> pl.DataFrame:
        """trace_id, span_id, `reward`: the sum of what is bound to each call."""
        return (
            self.edges.filter(pl.col("call_span_id").is_not_null() & (pl.col("name") == name))
            .group_by(pl.col("call_trace_id").alias("trace_id"), pl.col("call_span_id").alias("span_id"))
            .agg(pl.col("score").sort().sum().alias("reward"))
        )


def bind_rewards(
    evaluations: pl.DataFrame,
    calls: pl.DataFrame,
    spans: pl.DataFrame,
    twins: Twins,
    rollouts: pl.DataFrame,
    names: Sequence[str],
) -> Rewards:
    """Rewards called one of `names` from EVALUATIONS, for CALLS and the rollout table."""
    scored = evaluations.filter(pl.col("name").is_in(list(names)) & pl.col("score").is_finite())
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
    edges = bind(named.filter(counts), calls, spans, twins)
    return Rewards(edges.select(pl.col(name).cast(kind) for name, kind in EDGES.items()), unmatched, in_vain)


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

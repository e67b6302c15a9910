"""Evaluations as they were stored, and late feedback that names only the response it is about."""

from collections.abc import Collection, Iterable
from typing import Final

import polars as pl

from trainspan_processing.read.json_attributes import number, text
from trainspan_processing.tables import EVALUATIONS, ROLLOUT_KEY, Schema, empty
from trainspan_processing.traces.call_matching import response_stem
from trainspan_schemas import keys

__all__ = [
    "COUNTED",
    "EVALUATION_COLUMNS",
    "FEEDBACK_QUERY",
    "collect_evaluations",
    "collect_feedback",
    "count_evaluations",
    "with_feedback",
]

EVALUATION_COLUMNS: Final = [name for name in EVALUATIONS if name != "response_id"]
"""Columns asked of the read `evaluations`."""

FEEDBACK_QUERY: Final = f"""
    SELECT seq, time_ns, attributes, untrusted
    FROM logs
    WHERE event_name = '{keys.EVALUATION_EVENT}' AND span_id IS NULL
        AND contains(attributes, '"{keys.GEN_AI_RESPONSE_ID}"')"""
"""Evaluations that came as log records with a response id and without a span: the view does not tell the response."""

_FEEDBACK: Final[Schema] = {
    "name": pl.String,
    "score": pl.Float64,
    "source": pl.String,
    "time_ns": pl.Int64,
    "untrusted": pl.Boolean,
    "response_id": pl.String,
}
_SAME: Final = ["name", "score", "time_ns", "untrusted"]


def collect_evaluations(batches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The read `evaluations` → frame EVALUATIONS; what two stores both hold counts once."""
    kinds = {name: EVALUATIONS[name] for name in EVALUATION_COLUMNS}
    frames = [batch.select("store", *(pl.col(name).cast(kind) for name, kind in kinds.items())) for batch in batches]
    if not frames:
        return empty(EVALUATIONS)
    occurrence = pl.int_range(pl.len()).over("store", *kinds).alias("occurrence")
    unique = pl.concat(frames).with_columns(occurrence).unique([*kinds, "occurrence"])
    return unique.with_columns(pl.lit(None, dtype=pl.String).alias("response_id")).select(*EVALUATIONS)


COUNTED: Final[Schema] = {"rollout_id": pl.String, "rewards": pl.UInt32}
"""How many evaluations there are of a rollout."""


def count_evaluations(evaluations: pl.DataFrame, names: Collection[str]) -> pl.DataFrame:
    """COUNTED of EVALUATIONS with one of these names and a score, by rollout id; without feedback on responses alone."""
    counts = pl.col("name").is_in(list(names)) & pl.col("score").is_finite() & pl.col("response_id").is_null()
    counted = evaluations.filter(counts & pl.col("rollout_id").is_not_null()).group_by("rollout_id").len("rewards")
    return counted.select(pl.col(name).cast(kind) for name, kind in COUNTED.items())


def collect_feedback(batches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The rows of FEEDBACK_QUERY, each evaluation once: name, score, source, time_ns, response_id."""
    frames = [
        batch.select(
            text(keys.EVALUATION_NAME).alias("name"),
            number(keys.EVALUATION_SCORE).alias("score"),
            text(keys.EVALUATION_SOURCE).fill_null("agent").alias("source"),
            pl.col("time_ns").cast(pl.Int64),
            pl.col("untrusted").cast(pl.Boolean),
            text(keys.GEN_AI_RESPONSE_ID).alias("response_id"),
            text(keys.EVALUATION_ID).alias("id"),
        )
        for batch in batches
    ]
    nothing = pl.DataFrame(schema={**_FEEDBACK, "id": pl.String})
    return pl.concat([nothing, *frames]).unique([*_FEEDBACK, "id"]).select(*_FEEDBACK)


def with_feedback(evaluations: pl.DataFrame, feedback: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """EVALUATIONS with the feedback on responses of `calls`, as evaluations of these calls' spans.

    A response of several choices is meant by its first one, and one that an agent claims too by the call of the policy
    server. Feedback on a response that is not among the calls stays out.
    """
    if feedback.is_empty():
        return evaluations
    answered = (
        calls.filter(pl.col("response_id").is_not_null() & pl.col("rollout_id").is_not_null())
        .with_columns(pl.col("untrusted").fill_null(False))
        .sort("response_id", "untrusted", *ROLLOUT_KEY, "choice_index", "span_id")
        .select(response_stem().alias("stem"), "trace_id", "span_id", "rollout_id", "attempt")
        .unique("stem", keep="first", maintain_order=True)
    )
    found = feedback.with_columns(response_stem().alias("stem")).join(answered, on="stem", how="inner")
    # The same record may be in the read too, bound to nothing or to its rollout alone: the response says more.
    rest = evaluations.join(feedback.select(_SAME), on=_SAME, how="anti", nulls_equal=True)
    kept = evaluations.filter(pl.col("span_id").is_not_null())
    rest = pl.concat([rest.filter(pl.col("span_id").is_null()), kept])
    nothing = {"of": pl.String, "on_span": pl.Boolean}
    found = found.with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in nothing.items())
    return pl.concat([rest, found.select(*EVALUATIONS)])

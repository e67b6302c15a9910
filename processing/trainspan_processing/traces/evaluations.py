"""Stored evaluations, and late feedback that names only its response."""

from collections.abc import Collection, Iterable
from typing import Final

import polars as pl

from trainspan_processing.read.json_attributes import number, text
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.read.span_words import quoted_ids
from trainspan_processing.tables import EVALUATIONS, ROLLOUT_KEY, Schema, empty
from trainspan_processing.traces.call_matching import response_stem
from trainspan_schemas.telemetry import keys

__all__ = [
    "CLAIMS",
    "COUNTED",
    "EVALUATION_COLUMNS",
    "collect_evaluations",
    "contested",
    "count_evaluations",
    "foreign_evaluations",
    "read_feedback",
    "response_claims",
    "with_feedback",
]

EVALUATION_COLUMNS: Final = [name for name in EVALUATIONS if name != "response_id"]
"""Columns requested from the read `evaluations`."""

_FEEDBACK_COLUMNS: Final = ["seq", "time_ns", "trace_id", "span_id", "attributes", "untrusted"]

_OWNED_QUERY: Final = """
    SELECT DISTINCT trace_id, span_id FROM evaluations WHERE rollout_id IS NOT NULL AND trace_id IN ({})"""
"""Spans whose evaluations have a rollout."""

_FEEDBACK: Final[Schema] = {
    "trace_id": pl.String,
    "span_id": pl.String,
    "name": pl.String,
    "score": pl.Float64,
    "source": pl.String,
    "time_ns": pl.Int64,
    "untrusted": pl.Boolean,
    "response_id": pl.String,
}
CLAIMS: Final[Schema] = {"stem": pl.String, "untrusted": pl.Boolean, "rollout_id": pl.String, "attempt": pl.Int32}
"""Which rollouts have a call with a response: `stem` is its id without the choice's number, `untrusted` whether an agent says so."""
_SAME: Final = ["name", "score", "time_ns", "untrusted", "span_id"]


def foreign_evaluations(source: Source, selection: Selection, rollouts: pl.DataFrame) -> pl.DataFrame:
    """rollout_id, `store` of those of `rollouts` with evaluations in a store that has no span of them.

    Such a store does not know their run and round, so reads by run or round leave these evaluations out. None are looked for
    if the selection is by neither, or if there is one store only.
    """
    nothing = pl.DataFrame(schema={"rollout_id": pl.String, "store": pl.UInt8})
    if len(source.stores) < 2 or (selection.run_id is None and selection.round is None):
        return nothing
    frames = [
        batch.filter(source.is_within("seq")).select("rollout_id", "store").join(rollouts, on="rollout_id", how="semi")
        for batch in source.read("foreign", Selection(), ["rollout_id", "seq"])
    ]
    return pl.concat([nothing, *frames]).unique()


def collect_evaluations(batches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The read `evaluations` → frame EVALUATIONS; evaluations found in two stores count once."""
    kinds = {name: EVALUATIONS[name] for name in EVALUATION_COLUMNS}
    frames = [batch.select("store", *(pl.col(name).cast(kind) for name, kind in kinds.items())) for batch in batches]
    if not frames:
        return empty(EVALUATIONS)
    occurrence = pl.int_range(pl.len()).over("store", *kinds).alias("occurrence")
    unique = pl.concat(frames).with_columns(occurrence).unique([*kinds, "occurrence"])
    return unique.with_columns(pl.lit(None, dtype=pl.String).alias("response_id")).select(*EVALUATIONS)


COUNTED: Final[Schema] = {"rollout_id": pl.String, "evaluations": pl.UInt32}
"""Number of evaluations of a rollout, whoever sent them."""


def count_evaluations(evaluations: pl.DataFrame, names: Collection[str]) -> pl.DataFrame:
    """COUNTED of EVALUATIONS with one of these names and a score, and of labels, also those that take one back, by rollout id, without
    late feedback on responses."""
    has_score = pl.col("name").is_in(list(names)) & pl.col("score").is_finite()
    counts = (has_score | (pl.col("name") == keys.LABEL)) & pl.col("response_id").is_null()
    counted = evaluations.filter(counts & pl.col("rollout_id").is_not_null()).group_by("rollout_id").len("evaluations")
    return counted.select(pl.col(name).cast(kind) for name, kind in COUNTED.items())


def read_feedback(source: Source) -> pl.DataFrame:
    """_FEEDBACK: late feedback on responses, from log records that name one.

    Excludes records in a span of a rollout, which are evaluations of that span; an evaluator's own span has no rollout.
    """
    events, response_key = [keys.EVALUATION_EVENT], keys.GEN_AI_RESPONSE_ID
    feedback = _collected(
        source.read("records", Selection(), _FEEDBACK_COLUMNS, event_names=events, attribute=response_key)
    )
    within = feedback.drop_nulls("span_id")
    if within.is_empty():
        return feedback
    query = _OWNED_QUERY.format(quoted_ids(within["trace_id"].drop_nulls().unique().to_list()))
    owned = [batch.select("trace_id", "span_id") for batch in source.query(query)]
    return feedback.join(pl.concat(owned), on=["trace_id", "span_id"], how="anti") if owned else feedback


def _collected(batches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """_FEEDBACK from _FEEDBACK_COLUMNS, each evaluation once: of those with the same id the one that the store keeps."""
    frames = [
        batch.select(
            "trace_id",
            "span_id",
            text(keys.EVALUATION_NAME).alias("name"),
            number(keys.EVALUATION_SCORE).alias("score"),
            text(keys.EVALUATION_SOURCE).fill_null("agent").alias("source"),
            pl.col("time_ns").cast(pl.Int64),
            pl.col("untrusted").cast(pl.Boolean),
            text(keys.GEN_AI_RESPONSE_ID).alias("response_id"),
            text(keys.EVALUATION_ID).alias("id"),
            "seq",
        )
        for batch in batches
    ]
    nothing = pl.DataFrame(schema={**_FEEDBACK, "id": pl.String, "seq": pl.Int64})
    records = pl.concat([nothing, *frames], how="vertical_relaxed").sort(pl.col("untrusted").fill_null(False), "seq")
    unique = records.unique([*_FEEDBACK, "id"], keep="first", maintain_order=True)
    return unique.filter(pl.col("id").is_null() | pl.col("id").is_first_distinct()).select(*_FEEDBACK)


def response_claims(feedback: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """CLAIMS of the responses that the feedback names, by CALLS."""
    asked = feedback.select(response_stem().alias("stem")).unique()
    return (
        calls.filter(pl.col("response_id").is_not_null() & pl.col("rollout_id").is_not_null())
        .select(response_stem().alias("stem"), pl.col("untrusted").fill_null(value=False), *ROLLOUT_KEY)
        .join(asked, on="stem", how="semi")
        .unique()
    )


def contested(claims: pl.DataFrame) -> pl.DataFrame:
    """CLAIMS of the responses that several rollouts have. If an agent claims one too, the call of the policy server has it."""
    best = claims.unique().filter(pl.col("untrusted") == pl.col("untrusted").min().over("stem"))
    return best.filter(pl.struct(ROLLOUT_KEY).n_unique().over("stem") > 1)


def with_feedback(
    evaluations: pl.DataFrame, feedback: pl.DataFrame, calls: pl.DataFrame, claims: pl.DataFrame
) -> pl.DataFrame:
    """EVALUATIONS with the feedback on responses of `calls`, as evaluations of these calls' spans.

    Feedback on a response with several choices goes to the first one, preferably by the policy server's record. Feedback on a
    response of several rollouts, by all CLAIMS, stays as it was read, as does feedback on other responses.
    """
    if feedback.is_empty():
        return evaluations
    owners = claims.filter(pl.col("untrusted") == pl.col("untrusted").min().over("stem"))
    owners = owners.join(contested(claims), on="stem", how="anti").select("stem", *ROLLOUT_KEY).unique()
    answered = (
        calls.filter(pl.col("response_id").is_not_null() & pl.col("rollout_id").is_not_null())
        .sort(pl.col("untrusted").fill_null(value=False), "response_id", *ROLLOUT_KEY, "choice_index", "span_id")
        .select(
            response_stem().alias("stem"),
            pl.col("trace_id").alias("call_trace_id"),
            pl.col("span_id").alias("call_span_id"),
            "rollout_id",
            "attempt",
        )
        .join(owners, on=["stem", *ROLLOUT_KEY], how="semi", maintain_order="left")
        .unique("stem", keep="first", maintain_order=True)
    )
    owned = feedback.with_columns(response_stem().alias("stem")).join(owners, on="stem", how="semi")
    bound = owned.join(answered, on="stem", how="inner")
    # The read may contain the same record, without a target or bound only to its rollout: the response is more specific.
    rest = evaluations.join(owned.select(_SAME), on=_SAME, how="anti", nulls_equal=True)
    bound = bound.drop("trace_id", "span_id").rename({"call_trace_id": "trace_id", "call_span_id": "span_id"})
    nothing = [name for name in EVALUATIONS if name not in bound.columns]
    bound = bound.with_columns(pl.lit(None, dtype=EVALUATIONS[name]).alias(name) for name in nothing)
    return pl.concat([rest, bound.select(*EVALUATIONS)])

"""The scores that raters gave rollouts: judges and their criteria, other evaluations, and people's labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.rewards.labels import is_label, read_labels
from trainspan_processing.tables import ROLLOUT_KEY, Schema
from trainspan_schemas.store.labels import Label, newest
from trainspan_schemas.telemetry import keys

__all__ = ["LABEL", "RATINGS", "Ratings", "is_of_people", "read_ratings"]

LABEL: Final = "label"
"""The rater whose scores are the newest labels, whoever gave them."""
RATINGS: Final[Schema] = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "group": pl.String,
    "task_id": pl.String,
    "rater": pl.String,
    "score": pl.Float64,
    "explanation": pl.String,
}
"""One row for each rater and rollout."""
_OF_PERSON: Final = f"{LABEL} by "
"""What the name of a rater that is one person begins with."""
_BOUNDARIES: Final = {"runner": 0, "explicit": 1, "request": 2, "process": 3}
"""Of a rollout's own spans: the order of the view `rollouts`."""
_ROOTS: Final = ["rollout_id", "attempt", "run_id", "round", "task_id", "trace_id", "span_id", "rollout_judge"]
_EVALUATIONS: Final = [
    *("rollout_id", "attempt", "trace_id", "span_id", "name", "score", "source", "time_ns", "untrusted", "explanation"),
    *("of", "about_response"),
]


@dataclass(frozen=True, slots=True)
class Ratings:
    """All that is compared."""

    frame: pl.DataFrame
    """RATINGS."""
    labels: dict[tuple[str, int], Label]
    """Rollout → its newest label that is not withdrawn."""
    preferences: Sequence[Label]
    """One of each pair: the newest, of the better one; none that was withdrawn."""
    groups: dict[tuple[str, int], str]
    """Rollout in a preference → its `group`."""
    rollouts: int
    without_rollout: int
    """Labels of rollouts that are not stored."""


def read_ratings(source: Source, selection: Selection) -> Ratings:
    """Reads the ended rollouts of the selection. Raises StoreError."""
    roots = _roots(source, selection)
    labels = read_labels(source)
    stored = frozenset(roots.select(ROLLOUT_KEY).iter_rows())
    mine = [label for label in labels if (label.rollout_id, label.attempt) in stored]
    current = {key: label for key, label in newest(mine).items() if not label.is_withdrawn}
    of_rollouts = {(each.rollout_id, each.attempt): each for key, each in current.items() if key[0] == "rollout"}
    people = sorted({label.by for label in mine})
    rows = [(*key, LABEL, each.score, each.reason) for key, each in of_rollouts.items()]
    for person in people if len(people) > 1 else ():
        own = newest(label for label in mine if label.by == person)
        rows += [
            (each.rollout_id, each.attempt, f"{_OF_PERSON}{person}", each.score, each.reason)
            for key, each in own.items()
            if key[0] == "rollout" and not each.is_withdrawn
        ]
    by_people = pl.DataFrame(
        rows, {name: kind for name, kind in RATINGS.items() if name not in ("group", "task_id")}, orient="row"
    )
    scores = pl.concat([_scores(source, selection, roots), by_people])
    facts = roots.select(*ROLLOUT_KEY, "task_id", _group().alias("group"))
    is_whole = selection.run_id is None and selection.round is None
    gone = {(label.rollout_id, label.attempt) for label in labels} - stored if is_whole else set[tuple[str, int]]()
    preferences = [label for key, label in sorted(current.items()) if key[0] == "pair"]
    compared = {(label.rollout_id, label.attempt) for label in preferences}
    groups = facts.select(*ROLLOUT_KEY, "group").iter_rows()
    return Ratings(
        scores.join(facts, on=ROLLOUT_KEY, how="inner").select(*RATINGS).sort("rater", *ROLLOUT_KEY),
        of_rollouts,
        preferences,
        {(rollout_id, attempt): group for rollout_id, attempt, group in groups if (rollout_id, attempt) in compared},
        roots.height,
        len(gone),
    )


def is_of_people(rater: str) -> bool:
    """Whether the rater is `label` or one person; no judge or other source has such a name."""
    return rater == LABEL or rater.startswith(_OF_PERSON)


def _group() -> pl.Expr:
    """The task within its run; rollouts without a task are independent."""
    alone = pl.concat_str("rollout_id", pl.col("attempt").cast(pl.String), separator=" ")
    task = pl.concat_str(pl.col("run_id").fill_null(""), "task_id", separator=" ")
    return pl.when(pl.col("task_id").is_null()).then(alone).otherwise(task)


def _roots(source: Source, selection: Selection) -> pl.DataFrame:
    """_ROOTS of the rollouts that have ended: the span of a trusted sender, the runner's before others."""
    columns = [*_ROOTS, "rollout_status", "rollout_boundary", "untrusted", "seq"]
    kinds = {"attempt": pl.Int32, "round": pl.Int32, "untrusted": pl.Boolean, "seq": pl.Int64}
    frames = [
        batch.filter(pl.col("rollout_status").is_not_null()).select(
            pl.col(name).cast(kinds.get(name, pl.String)) for name in columns
        )
        for batch in source.read("spans", selection, columns, without_calls=True)
    ]
    nothing = pl.DataFrame(schema={name: kinds.get(name, pl.String) for name in columns})
    ranked = (
        pl.concat([nothing, *frames])
        .with_columns(pl.col("attempt").fill_null(0))
        .filter(pl.col("rollout_id").is_not_null())
    )
    rank = pl.col("rollout_boundary").replace_strict(_BOUNDARIES, default=len(_BOUNDARIES), return_dtype=pl.Int8)
    ordered = ranked.sort("untrusted", rank, "seq", "span_id")
    return ordered.unique(ROLLOUT_KEY, keep="first", maintain_order=True).select(_ROOTS).sort(ROLLOUT_KEY)


def _scores(source: Source, selection: Selection, roots: pl.DataFrame) -> pl.DataFrame:
    """rollout_id, attempt, rater, score, explanation of the trusted evaluations of whole rollouts, the newest of each rater."""
    kinds = {"attempt": pl.Int32, "score": pl.Float64, "time_ns": pl.Int64, "untrusted": pl.Boolean}
    nothing = pl.DataFrame(schema={name: kinds.get(name, pl.String) for name in _EVALUATIONS})
    frames = [
        batch.select(pl.col(name).cast(kinds.get(name, pl.String)) for name in _EVALUATIONS)
        for batch in source.read("evaluations", selection, _EVALUATIONS)
    ]
    is_counted = (
        ~pl.col("untrusted").fill_null(value=False)
        & ~is_label()
        & ~pl.col("name").is_in(list(keys.MEASUREMENTS))
        & pl.col("score").is_finite()
        & pl.col("about_response").is_null()
        & (pl.col("of").fill_null("rollout") == "rollout")
    )
    own = roots.select(*ROLLOUT_KEY, "rollout_judge", pl.col("span_id").alias("root"))
    last = own.group_by("rollout_id").agg(pl.col("attempt").max().alias("last"))
    rows = pl.concat([nothing, *frames]).filter(is_counted).join(last, on="rollout_id", how="inner")
    rows = rows.with_columns(pl.coalesce("attempt", "last").alias("attempt")).join(own, on=ROLLOUT_KEY, how="inner")
    on_root = (pl.col("span_id") == pl.col("root")).fill_null(value=False)
    is_verdict = (pl.col("source") == "judge") & on_root & pl.col("rollout_judge").is_not_null()
    whole = rows.filter(pl.col("span_id").is_null() | on_root).filter((pl.col("source") != "judge") | is_verdict)
    giver = pl.when(is_verdict).then("rollout_judge").otherwise("source")
    rater = pl.when(pl.col("name") == keys.REWARD).then(giver).otherwise(pl.format("{}: {}", giver, "name"))
    is_like_person = (rater == LABEL) | rater.str.starts_with(_OF_PERSON)
    distinct = pl.when(is_like_person).then(pl.format("no person: {}", rater)).otherwise(rater)
    named = whole.with_columns(distinct.alias("rater")).sort("time_ns", "score")
    newest_of_each = named.unique([*ROLLOUT_KEY, "rater"], keep="last", maintain_order=True)
    return newest_of_each.select(*ROLLOUT_KEY, "rater", "score", "explanation")

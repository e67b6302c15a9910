"""Labels of people, as they are stored, and as rewards: the newest one of a rollout or call replaces its other rewards.

A label that was withdrawn counts for nothing. A label on a call is the reward of that call; it does not count beside a label on the
rollout, nor with a credit that looks only at the sum over a rollout. Preferences between two rollouts are no rewards: `trainspan
export dpo` makes pairs of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import EDGES, ROLLOUT_KEY, SPAN_KEY, empty
from trainspan_schemas.store.labels import Label, read_label, whole_pairs
from trainspan_schemas.telemetry import keys

__all__ = [
    "LABEL_RULE",
    "LabelEdges",
    "is_label",
    "label_edges",
    "read_labels",
    "with_whole_pairs",
    "without_labeled_calls",
]

LABEL_RULE: Final = "label"
"""The rule of a reward that is a label."""
_RECORD: Final = ["time_ns", "rollout_id", "trace_id", "span_id", "attributes", "untrusted"]
_ON_CALL: Final = ["call_trace_id", "call_span_id"]


@dataclass(frozen=True, slots=True)
class LabelEdges:
    """The labels that count."""

    of_rollouts: pl.DataFrame
    """EDGES."""
    of_calls: pl.DataFrame
    """EDGES."""
    counts: Counter[str] = field(default_factory=Counter)
    """Labeled `rollouts` and `calls`; `calls_unused`, whose labels do not count; rollouts with labels of pairs, `preferences`;
    labels `without_attempt`, which do not count."""


def read_labels(source: Source, rollout_ids: Sequence[str] | None = None) -> list[Label]:
    """All labels in the stores, or those of some rollouts, in any order, also those that others replace; none of a pair of which only
    one is stored. Raises StoreError."""
    labels = _read(source, rollout_ids)
    if rollout_ids is None:
        return whole_pairs(labels)
    wanted = frozenset(rollout_ids)
    others = sorted({label.other[0] for label in labels if label.other} - wanted)
    return [label for label in whole_pairs([*labels, *_read(source, others)]) if label.rollout_id in wanted]


def _read(source: Source, rollout_ids: Sequence[str] | None) -> list[Label]:
    if rollout_ids is not None and not rollout_ids:
        return []
    events, selection = [keys.EVALUATION_EVENT], Selection(rollout_ids=rollout_ids)
    rows = (
        row
        for batch in source.read("records", selection, _RECORD, event_names=events, attribute=keys.LABELED_BY)
        for row in batch.select(_RECORD).iter_rows()
    )
    labels = {
        label.id + label.rollout_id: label
        for time_ns, rollout_id, trace_id, span_id, attributes, untrusted in rows
        if (label := read_label(time_ns, rollout_id, (trace_id, span_id), attributes, untrusted=untrusted))
    }
    return list(labels.values())


def is_label() -> pl.Expr:
    """Whether a row of EVALUATIONS is a label of any kind; its sender may lack the right to give it (`untrusted`)."""
    return (pl.col("source") == keys.LABEL).fill_null(value=False)


def label_edges(
    evaluations: pl.DataFrame,
    calls: pl.DataFrame,
    rollouts: pl.DataFrame,
    values: Mapping[str, float],
    names: Sequence[str],
    *,
    of_calls_count: bool,
) -> LabelEdges:
    """The labels in EVALUATIONS of CALLS and the rollout table, as each of the rewards `names`.

    `values` are what `good` and `bad` are worth.
    """
    given = evaluations.filter(is_label() & ~pl.col("untrusted").fill_null(value=False)).join(
        rollouts.select("rollout_id"), on="rollout_id", how="semi"
    )
    if given.is_empty():
        return LabelEdges(empty(EDGES), empty(EDGES))
    labels = given.join(rollouts.select(ROLLOUT_KEY), on=ROLLOUT_KEY, how="semi")
    is_pair = pl.col("name") == keys.PREFERENCE
    counts = Counter(without_attempt=given["attempt"].null_count())
    counts |= Counter(preferences=labels.filter(is_pair).select(ROLLOUT_KEY).unique().height)
    said = _newest(labels.filter(pl.col("name") == keys.LABEL)).filter(pl.col("score").is_not_null())
    good, bad = values["good"], values["bad"]
    said = said.with_columns((bad + pl.col("score") * (good - bad)).alias("score"))
    on_rollouts, on_calls = said.filter(pl.col("span_id").is_null()), said.filter(pl.col("span_id").is_not_null())
    known = on_calls.join(calls.select(*ROLLOUT_KEY, *SPAN_KEY), on=[*ROLLOUT_KEY, *SPAN_KEY], how="semi")
    known = known.join(on_rollouts, on=ROLLOUT_KEY, how="anti")
    counted = known if of_calls_count else known.clear()
    counts |= Counter(rollouts=on_rollouts.height, calls=counted.height, calls_unused=on_calls.height - counted.height)
    return LabelEdges(_edges(on_rollouts, names), _edges(counted, names), +counts)


def with_whole_pairs(source: Source, counts: Mapping[str, int], rollouts: pl.DataFrame) -> dict[str, int]:
    """The counts of LabelEdges with `preferences` without those of a pair of which only one label is stored. Reads the labels
    of `rollouts` (rollout_id, attempt) only if there are any. Raises StoreError."""
    if not counts.get("preferences"):
        return dict(counts)
    known = frozenset(rollouts.select(ROLLOUT_KEY).iter_rows())
    labels = read_labels(source, sorted({rollout_id for rollout_id, _ in known}))
    compared = {(label.rollout_id, label.attempt) for label in labels if label.other} & known
    return dict(+Counter({**counts, "preferences": len(compared)}))


def without_labeled_calls(edges: pl.DataFrame, of_calls: pl.DataFrame) -> pl.DataFrame:
    """EDGES without those on a call that has a label."""
    return edges.join(of_calls, on=[*ROLLOUT_KEY, *_ON_CALL], how="anti", maintain_order="left")


def _newest(labels: pl.DataFrame) -> pl.DataFrame:
    """The newest label of each rollout and call; of two at the same time the one with the greater score."""
    ordered = labels.sort("time_ns", "score", descending=True, nulls_last=True)
    return ordered.unique([*ROLLOUT_KEY, *SPAN_KEY], keep="first", maintain_order=True).sort(*ROLLOUT_KEY, *SPAN_KEY)


def _edges(labels: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    rows = labels.drop("name").join(pl.DataFrame({"name": names}, schema={"name": pl.String}), how="cross")
    keyed = rows.with_columns(
        pl.lit(LABEL_RULE).alias("rule"),
        pl.col("trace_id").alias("call_trace_id"),
        pl.col("span_id").alias("call_span_id"),
    )
    return keyed.select(pl.col(column).cast(kind) for column, kind in EDGES.items())

"""Rewards: the evaluations with the chosen names, bound to rollouts and calls (binding.py), and their sums.

Evaluations with the same name and target add up. A missing reward is NULL, never 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from trainspan_processing.rewards.binding import bind
from trainspan_processing.rewards.labels import is_label
from trainspan_processing.tables import EDGES, ROLLOUT_KEY, SPAN_KEY, Schema
from trainspan_processing.traces.call_matching import CallMatches
from trainspan_schemas.telemetry import keys

__all__ = ["COUNTED_REWARDS", "Rewards", "bind_rewards", "count_rewards"]

COUNTED_REWARDS: Final[Schema] = {"rollout_id": pl.String, "rewards": pl.UInt32}
"""Number of a rollout's evaluations that count as rewards."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards with the chosen names."""

    edges: pl.DataFrame
    """EDGES, one row per evaluation."""
    unmatched: int
    """Number of evaluations without a rollout in the index."""
    ignored_self_rewards: int
    """Number of rollouts with a judge that also have rewards from other sources, which are ignored."""
    untrusted: pl.DataFrame
    """rollout_id, attempt of rollouts with rewards sent with an agent's token although another token is required."""
    invalid: pl.DataFrame
    """rollout_id, attempt of rollouts with a reward that counts but whose score is no finite number."""

    def of_rollouts(self, name: str) -> pl.DataFrame:
        """rollout_id, attempt, `rollout_reward`: the sum of the rewards bound to the rollout itself."""
        return (
            self.edges.filter(pl.col("call_span_id").is_null() & (pl.col("name") == name))
            .group_by(ROLLOUT_KEY)
            .agg(pl.col("score").sort().sum().alias("rollout_reward"))
        )

    def of_calls(self, name: str) -> pl.DataFrame:
        """trace_id, span_id, `reward`: the sum of the rewards bound to each call."""
        return (
            self.edges.filter(pl.col("call_span_id").is_not_null() & (pl.col("name") == name))
            .group_by(pl.col("call_trace_id").alias("trace_id"), pl.col("call_span_id").alias("span_id"))
            .agg(pl.col("score").sort().sum().alias("reward"))
        )


def bind_rewards(
    evaluations: pl.DataFrame,
    calls: pl.DataFrame,
    spans: pl.DataFrame,
    matches: CallMatches,
    rollouts: pl.DataFrame,
    names: Sequence[str],
) -> Rewards:
    """The rewards with one of `names` from EVALUATIONS, bound to CALLS and the rollout table. Labels are none (labels.py)."""
    chosen = evaluations.filter(pl.col("name").is_in(list(names)) & ~is_label())
    is_scored = pl.col("score").is_finite().fill_null(value=False)
    attributed = _with_attempt(chosen, rollouts)
    unmatched = chosen.filter(is_scored).height - attributed.filter(is_scored).height
    is_untrusted = pl.col("untrusted").fill_null(value=False)
    untrusted = attributed.filter(is_untrusted & is_scored).select(ROLLOUT_KEY).unique(maintain_order=True)
    attributed = _judged(attributed.filter(~is_untrusted), spans, rollouts)
    ignored_self_rewards = attributed.filter(~pl.col("counts"))["rollout_id"].n_unique()
    counted = attributed.filter("counts").drop("counts")
    edges = bind(counted.filter(is_scored), calls, spans, matches)
    return Rewards(
        edges.select(pl.col(name).cast(kind) for name, kind in EDGES.items()),
        unmatched,
        ignored_self_rewards,
        untrusted,
        counted.filter(~is_scored).select(ROLLOUT_KEY).unique(maintain_order=True),
    )


def count_rewards(
    evaluations: pl.DataFrame,
    spans: pl.DataFrame,
    rollouts: pl.DataFrame,
    names: Sequence[str],
    *,
    of_calls_count: bool,
) -> pl.DataFrame:
    """COUNTED_REWARDS: how many of EVALUATIONS with one of `names` reward, without late feedback on responses; labels, also those that
    take one back, and on calls only if these count."""
    of_label = (pl.col("name") == keys.LABEL) & pl.col("attempt").is_not_null()
    if not of_calls_count:
        of_label &= pl.col("span_id").is_null()
    by_name = pl.col("name").is_in(list(names)) & pl.col("score").is_finite() & pl.col("response_id").is_null()
    is_reward = pl.when(is_label()).then(of_label).otherwise(by_name)
    attributed = _with_attempt(evaluations.filter(is_reward & ~pl.col("untrusted").fill_null(value=False)), rollouts)
    counted = _judged(attributed, spans, rollouts).filter("counts").group_by("rollout_id").len("rewards")
    return counted.select(pl.col(name).cast(kind) for name, kind in COUNTED_REWARDS.items())


def _judged(evaluations: pl.DataFrame, spans: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Evaluations of trusted senders with `counts`: of a rollout with a judge only the judge's own do, and people's labels."""
    joined = evaluations.join(
        rollouts.select(
            *ROLLOUT_KEY, "judge", pl.col("trace_id").alias("root_trace_id"), pl.col("span_id").alias("root_span_id")
        ),
        on=ROLLOUT_KEY,
        how="inner",
    )
    on_root = (pl.col("trace_id") == pl.col("root_trace_id")) & (pl.col("span_id") == pl.col("root_span_id"))
    counts = (
        pl.col("judge").is_null()
        | is_label()
        | (on_root.fill_null(False) & (pl.col("source") == "judge") & pl.col("on_span").fill_null(False))
    )
    return _without_other_roots(joined, spans).with_columns(counts.alias("counts"))


def _without_other_roots(evaluations: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """The evaluations (with `root_trace_id` and `root_span_id`) without those on a second own span of a rollout, of the same kind:
    the span was sent again under another id, and so were its evaluations."""
    is_root = (pl.col("trace_id") == pl.col("root_trace_id")) & (pl.col("span_id") == pl.col("root_span_id"))
    if evaluations.select(is_root.fill_null(value=False).all()).item():
        return evaluations
    roots = spans.filter(pl.col("status").is_not_null()).select(*SPAN_KEY, pl.col("boundary").fill_null(""))
    located = evaluations.join(roots.rename({"boundary": "_on"}), on=SPAN_KEY, how="left", maintain_order="left").join(
        roots.rename({"trace_id": "root_trace_id", "span_id": "root_span_id", "boundary": "_root"}),
        on=["root_trace_id", "root_span_id"],
        how="left",
        maintain_order="left",
    )
    return located.filter(((pl.col("_on") != pl.col("_root")) | is_root).fill_null(value=True)).drop("_on", "_root")


def _with_attempt(evaluations: pl.DataFrame, rollouts: pl.DataFrame) -> pl.DataFrame:
    """Evaluations of known rollouts; the attempt is taken from their trace, else it is the rollout's last."""
    last = rollouts.group_by("rollout_id").agg(pl.col("attempt").max().alias("last_attempt"))
    return (
        evaluations.join(last, on="rollout_id", how="inner")
        .with_columns(pl.coalesce("attempt", "last_attempt").alias("attempt"))
        .drop("last_attempt")
    )

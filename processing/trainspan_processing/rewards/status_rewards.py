"""Failed rollouts that are trained anyway: rewards by status, and the statuses that a reward function is called for.

The same setting says what people's labels are worth.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import polars as pl

from trainspan_processing.tables import EDGES, ROLLOUT_KEY
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry.status import ROLLOUT_STATUSES

__all__ = ["FUNCTION_STATUSES", "STATUS_RULE", "label_values", "status_edges", "status_rewards", "with_status_edges"]

FUNCTION_STATUSES: Final = ("ok", "agent_error", "context_overflow", "timeout", "judge_error")
"""Statuses of the rollouts that a reward function is called for. Cancelled rollouts and infrastructure failures are no evidence
about the policy; `status_rewards` may still name them."""

STATUS_RULE: Final = "status"
"""The rule of a reward by status."""

_LABELS: Final[Mapping[str, float]] = {"good": 1.0, "bad": 0.0}
"""Label → its reward by default."""


def label_values(rewards: Mapping[str, float]) -> dict[str, float]:
    """What the labels `good` and `bad` are worth by `status_rewards`."""
    return {label: rewards.get(label, value) for label, value in _LABELS.items()}


def status_rewards(text: str | None) -> dict[str, float]:
    """Parses `timeout=0,agent_error=-1,bad=-1`. Raises UsageError if a status or label is unknown or has no number."""
    rewards: dict[str, float] = {}
    failed = [status for status in ROLLOUT_STATUSES if status != "ok"]
    for item in filter(None, (part.strip() for part in (text or "").split(","))):
        status, _, score = (part.strip() for part in item.partition("="))
        if status not in (*failed, *_LABELS):
            raise UsageError(
                f"status_rewards = {text!r}: unknown failure {status!r}; failures are {', '.join(failed)}, and labels good and bad"
            )
        try:
            rewards[status] = float(score)
        except ValueError:
            rewards[status] = math.nan
        if not math.isfinite(rewards[status]):
            raise UsageError(f"status_rewards = {text!r}: {item!r} has no finite reward; write {status}=0")
    return rewards


def status_edges(rules: Mapping[str, float], names: Sequence[str], rollouts: pl.DataFrame) -> pl.DataFrame:
    """EDGES: each of the rewards `names` for every rollout whose status has a reward."""
    scores = pl.DataFrame(list(rules.items()), schema={"status": pl.String, "score": pl.Float64}, orient="row")
    rows = rollouts.join(scores, on="status").join(
        pl.DataFrame({"name": names}, schema={"name": pl.String}), how="cross"
    )
    return rows.select(
        *ROLLOUT_KEY,
        pl.lit(STATUS_RULE).alias("rule"),
        pl.lit(None, dtype=pl.String).alias("call_trace_id"),
        pl.lit(None, dtype=pl.String).alias("call_span_id"),
        "name",
        "score",
        pl.lit(STATUS_RULE).alias("source"),
        pl.col("end_ns").alias("time_ns"),
    ).select(pl.col(column).cast(kind) for column, kind in EDGES.items())


def with_status_edges(edges: pl.DataFrame, by_status: pl.DataFrame) -> pl.DataFrame:
    """EDGES in which a rollout's reward by status replaces all its other rewards."""
    return pl.concat([edges.join(by_status, on=ROLLOUT_KEY, how="anti", maintain_order="left"), by_status])

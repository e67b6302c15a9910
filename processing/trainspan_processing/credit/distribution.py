"""Distributions of values: order statistics and a histogram, as plain JSON values for the manifest."""

from typing import Any, Final

import numpy as np
import polars as pl

from trainspan_processing.credit.baselines import spread_reason
from trainspan_schemas.artifacts.manifest import Distribution

__all__ = ["BINS", "distribution", "group_spread"]

BINS: Final = 20


def distribution(values: pl.Series) -> Distribution:
    """n, mean, std (ddof 1), min, p10, p50, p90, max, and the `counts` of at most BINS equal bins between `edges`.

    Quantiles are values that occur (the lower of two neighbors). Without values, everything is None and the histogram empty.
    NULLs are ignored.
    """
    present: Any = values.drop_nulls()  # Polars' own types do not say that its figures are numbers
    counts, edges = _histogram(present)
    return {
        "n": present.len(),
        "mean": present.mean(),
        "std": present.std() if present.len() > 1 else None,
        "min": present.min(),
        "p10": present.quantile(0.1, "lower"),
        "p50": present.quantile(0.5, "lower"),
        "p90": present.quantile(0.9, "lower"),
        "max": present.max(),
        "edges": edges,
        "counts": counts,
    }


def group_spread(rollouts: pl.DataFrame) -> dict[str, int]:
    """Numbers of groups, of groups with one rollout, and of groups without spread, from compared rollouts with `group_id` and
    `reward`."""
    reward = pl.col("reward")
    groups = rollouts.group_by("group_id").agg(pl.len().alias("size"), reward.min().alias("least"), reward.max())
    reasons = groups.select(spread_reason(pl.col("size"), pl.col("least"), reward).alias("reason"))["reason"]
    return {
        "seen": groups.height,
        "singleton": int((reasons == "singleton_group").sum()),
        "zero_spread": int((reasons == "zero_spread_group").sum()),
    }


def _histogram(values: pl.Series) -> tuple[list[int], list[float]]:
    if values.is_empty():
        return [], []
    array = values.cast(pl.Float64).to_numpy()
    low, high = float(array.min()), float(array.max())
    if low == high:
        return [len(array)], [low, high]
    # Integers in a small range get one bin each.
    whole = high - low < BINS and bool((array == np.round(array)).all())
    bins = np.arange(low, high + 2) - 0.5 if whole else np.linspace(low, high, BINS + 1)
    counts, edges = np.histogram(array, bins)
    return counts.tolist(), edges.tolist()

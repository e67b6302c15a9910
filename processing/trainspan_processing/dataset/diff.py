"""The differences between two datasets: settings, rollouts, rows, rewards and advantages.

Rows are identified by their call's span, rollouts by (rollout_id, attempt). The place and time of the build and the store
files do not count as differences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import polars as pl

from trainspan_processing.dataset.published import Published
from trainspan_processing.tables import ROLLOUT_KEY, SPAN_KEY
from trainspan_schemas.artifacts.dataset import COLUMNS
from trainspan_schemas.artifacts.manifest import DatasetManifest

__all__ = ["Difference", "ItemChange", "Overlap", "ValueChanges", "compare_datasets"]

EXAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class ItemChange:
    """One item with different values; `what` names it."""

    what: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many items A and B have in common."""

    only_a: int
    only_b: int
    both: int
    why_not_in_b: dict[str, int]
    """Reason → items of A that B dropped; `not seen` if B did not look at the rollout."""
    why_not_in_a: dict[str, int]


@dataclass(frozen=True, slots=True)
class ValueChanges:
    """How a number differs over the items in both."""

    of: int
    changed: int
    mean_a: float | None
    mean_b: float | None
    mean_change: float | None
    """Mean |b − a| over all items in both."""
    max_change: float | None
    sign_flips: int
    """Positive in one, negative in the other."""
    correlation: float | None
    """Pearson; None if either is constant."""
    largest: list[ItemChange]


@dataclass(frozen=True, slots=True)
class Difference:
    """All changes from A to B."""

    settings: list[ItemChange]
    rollouts: Overlap
    rows: Overlap
    rewards: ValueChanges
    """Rewards of rollouts."""
    advantages: ValueChanges
    """Advantages of rows."""
    columns: dict[str, int]
    """Other column → number of common rows in which it differs."""
    order_differs: bool
    """Whether the common rows are in a different order."""

    @property
    def is_empty(self) -> bool:
        """Whether the same settings gave the same rows of the same rollouts."""
        overlaps = (self.rollouts, self.rows)
        return not (
            self.settings
            or any(overlap.only_a or overlap.only_b for overlap in overlaps)
            or self.rewards.changed
            or self.advantages.changed
            or self.columns
            or self.order_differs
        )

    def record(self) -> dict[str, object]:
        """The difference as JSON values."""
        return {"equal": self.is_empty, **asdict(self)}


def compare_datasets(a: Published, b: Published) -> Difference:
    """The changes from `a` to `b`. Raises DatasetError if one of them is damaged."""
    seen_a, seen_b = a.seen(), b.seen()
    names = [name for name in COLUMNS if name in a.columns() and name in b.columns()]
    rows_a, rows_b = (dataset.rows(_comparable(names)).with_row_index("row") for dataset in (a, b))
    both = rows_a.join(rows_b, on=SPAN_KEY, how="inner", suffix="_b", maintain_order="left")
    rewarded = _rewarded(seen_a).join(
        _rewarded(seen_b), on=ROLLOUT_KEY, how="inner", suffix="_b", maintain_order="left"
    )
    return Difference(
        settings=_changes(_settings(a.manifest), _settings(b.manifest)),
        rollouts=_overlap(
            seen_a.filter(pl.col("kept") > 0), seen_b.filter(pl.col("kept") > 0), seen_a, seen_b, ROLLOUT_KEY
        ),
        rows=_overlap(rows_a, rows_b, seen_a, seen_b, SPAN_KEY),
        rewards=_value_changes(rewarded, "reward", pl.format("{}", "rollout_id")),
        advantages=_value_changes(both, "advantage", pl.format("{} call {}", "rollout_id", "call_index")),
        columns=_other_columns(both, names),
        order_differs=not both["row_b"].is_sorted(),
    )


def _comparable(names: Sequence[str]) -> list[pl.Expr]:
    """These columns, with lists replaced by a hash that is valid within this process."""
    return [pl.col(name).hash() if COLUMNS[name].startswith("list") else pl.col(name) for name in names]


def _rewarded(seen: pl.DataFrame) -> pl.DataFrame:
    return seen.filter(pl.col("reward").is_not_null()).select(*ROLLOUT_KEY, "reward")


def _settings(manifest: DatasetManifest) -> dict[str, object]:
    """The settings that determined the rows, including a baseline that was chosen by default."""
    return {**manifest["settings"], "baseline": manifest["credit"]["baseline"]}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ItemChange]:
    names = dict.fromkeys([*a, *b])
    return [ItemChange(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def _overlap(a: pl.DataFrame, b: pl.DataFrame, seen_a: pl.DataFrame, seen_b: pl.DataFrame, key: list[str]) -> Overlap:
    only_a, only_b = a.join(b, on=key, how="anti"), b.join(a, on=key, how="anti")
    return Overlap(
        only_a.height,
        only_b.height,
        a.height - only_a.height,
        _count_reasons(only_a, seen_b),
        _count_reasons(only_b, seen_a),
    )


def _count_reasons(items: pl.DataFrame, seen: pl.DataFrame) -> dict[str, int]:
    """Why `items` are not in the dataset that saw `seen`, most frequent first."""
    why = (
        pl.when(pl.col("there").is_null())
        .then(pl.lit("not seen"))
        .otherwise(pl.coalesce("reason", pl.lit("this call alone was dropped")))
    )
    there = seen.select(*ROLLOUT_KEY, "reason", pl.lit(True).alias("there"))
    counted = items.select(ROLLOUT_KEY).join(there, on=ROLLOUT_KEY, how="left").group_by(why.alias("why")).len()
    return dict(counted.sort("len", "why", descending=[True, False]).iter_rows())


def _value_changes(both: pl.DataFrame, name: str, label: pl.Expr) -> ValueChanges:
    a, b = pl.col(name), pl.col(f"{name}_b")
    pairs = both.select(label.alias("what"), a.alias("a"), b.alias("b"), (b - a).abs().alias("change"))
    largest = pairs.filter(pl.col("change") > 0).sort("change", "what", descending=[True, False]).head(EXAMPLES)
    correlation = pairs.select(pl.corr("a", "b")).item() if pairs.height > 1 else None
    return ValueChanges(
        of=pairs.height,
        changed=pairs.filter(pl.col("a").ne_missing(pl.col("b"))).height,
        mean_a=_mean(pairs["a"]),
        mean_b=_mean(pairs["b"]),
        mean_change=_mean(pairs["change"]),
        max_change=pairs["change"].max() if pairs.height else None,  # type: ignore[arg-type]
        sign_flips=pairs.filter(pl.col("a") * pl.col("b") < 0).height,
        correlation=correlation if correlation is not None and math.isfinite(correlation) else None,
        largest=[ItemChange(*row) for row in largest.select("what", "a", "b").iter_rows()],
    )


def _mean(values: pl.Series) -> float | None:
    mean = values.mean()
    return mean if isinstance(mean, float) else None


def _other_columns(both: pl.DataFrame, names: Sequence[str]) -> dict[str, int]:
    names = [name for name in names if name not in (*SPAN_KEY, "advantage")]
    counts = both.select(pl.col(name).ne_missing(pl.col(f"{name}_b")).sum().alias(name) for name in names).row(0)
    return {name: count for name, count in zip(names, counts, strict=True) if count}

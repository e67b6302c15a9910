"""The difference of two datasets in the terminal, as a summary."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from trainspan_processing.dataset.diff import Difference, Overlap, ValueChanges

__all__ = ["print_difference"]


def print_difference(difference: "Difference", a: str, b: str) -> None:
    """Prints what changed, or one line if nothing did."""
    console = Console(markup=False, highlight=False, emoji=False)
    for line in _summary(difference, a, b):
        console.print(Text(line), soft_wrap=True)


def _summary(difference: "Difference", a: str, b: str) -> Iterator[str]:
    if difference.is_empty:
        yield f"no difference: {difference.rows.both} rows of {difference.rollouts.both} rollouts"
        return
    yield f"A  {a}\nB  {b}"
    for change in difference.settings:
        yield f"setting {change.what}: {_shown(change.before)} → {_shown(change.after)}"
    yield from _overlap("rollouts", difference.rollouts)
    yield from _overlap("rows", difference.rows)
    if difference.rewards.of:
        yield _values("reward of rollouts", difference.rewards)
        yield _values("advantage of rows", difference.advantages)
    if difference.columns:
        others = ", ".join(f"{name} ({count})" for name, count in difference.columns.items())
        yield f"other columns that differ in common rows: {others}"
    if difference.order_differs:
        yield "the common rows are in a different order"
    yield "largest changes: --format json, or the datasets' pages in `trainspan view`"


def _overlap(name: str, overlap: "Overlap") -> Iterator[str]:
    yield f"{name}: {overlap.only_a} only in A, {overlap.only_b} only in B, {overlap.both} in both"
    for dataset, reasons in (("B", overlap.why_not_in_b), ("A", overlap.why_not_in_a)):
        if reasons:
            yield f"  not in {dataset}: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def _values(name: str, changes: "ValueChanges") -> str:
    return (
        f"{name}: {changes.changed} of {changes.of} changed, mean {_shown(changes.mean_a)} → {_shown(changes.mean_b)}, "
        f"|B − A| {_shown(changes.mean_change)} on average and at most {_shown(changes.max_change)}, "
        f"{changes.sign_flips} changed sign, correlation {_shown(changes.correlation)}"
    )


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The difference of two datasets in the terminal."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from trainspan_processing.dataset.diff import Difference, ItemChange, Overlap, ValueChanges

__all__ = ["print_difference"]


def print_difference(difference: "Difference", a: str, b: str) -> None:
    """Prints tables of the changes, or one line if there are none."""
    console = Console(markup=False, highlight=False, emoji=False)
    if difference.is_empty:
        console.print(f"no difference: {difference.rows.both} rows of {difference.rollouts.both} rollouts")
        return
    console.print(Text(f"A  {a}\nB  {b}", style="dim"))
    if difference.settings:
        console.print(_changes("settings", difference.settings))
    console.print(_overlaps({"rollouts": difference.rollouts, "rows": difference.rows}))
    if difference.rewards.of:
        console.print(_values({"reward of rollouts": difference.rewards, "advantage of rows": difference.advantages}))
    if difference.advantages.largest:
        console.print(_changes("largest changes of an advantage", difference.advantages.largest))
    if difference.rewards.largest:
        console.print(_changes("largest changes of a reward", difference.rewards.largest))
    others = ", ".join(f"{name} ({count})" for name, count in difference.columns.items())
    if others:
        console.print(f"other columns that differ in common rows: {others}")
    if difference.order_differs:
        console.print("the common rows are in a different order")


def _changes(title: str, changes: "list[ItemChange]") -> Table:
    table = _table(title, "A", "B")
    for change in changes:
        table.add_row(Text(change.what), Text(_shown(change.before)), Text(_shown(change.after)))
    return table


def _overlaps(overlaps: "Mapping[str, Overlap]") -> Table:
    table = _table("", "only A", "only B", "both")
    for name, overlap in overlaps.items():
        table.add_row(name, str(overlap.only_a), str(overlap.only_b), str(overlap.both))
        for reason, count in overlap.why_not_in_b.items():
            table.add_row(Text(f"  in B: {reason}"), str(count), "", "")
        for reason, count in overlap.why_not_in_a.items():
            table.add_row(Text(f"  in A: {reason}"), "", str(count), "")
    return table


def _values(changes: "Mapping[str, ValueChanges]") -> Table:
    table = _table("in both", *changes)
    figures: list[tuple[str, Callable[[ValueChanges], str]]] = [
        ("changed", lambda change: f"{change.changed} of {change.of}"),
        ("mean A", lambda change: _shown(change.mean_a)),
        ("mean B", lambda change: _shown(change.mean_b)),
        ("mean |B − A|", lambda change: _shown(change.mean_change)),
        ("largest |B − A|", lambda change: _shown(change.max_change)),
        ("sign changed", lambda change: str(change.sign_flips)),
        ("correlation", lambda change: _shown(change.correlation)),
    ]
    for name, figure in figures:
        table.add_row(name, *(figure(change) for change in changes.values()))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table()
    table.add_column(title, style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

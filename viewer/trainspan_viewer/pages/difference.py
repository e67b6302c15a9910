"""The differences between two datasets, as `trainspan diff` computes them."""

from collections.abc import Callable, Sequence

from trainspan_processing.dataset.diff import Difference, ItemChange, Overlap, ValueChanges
from trainspan_viewer.html.elements import Child, Element, element, table
from trainspan_viewer.html.formats import count, number, plain

__all__ = ["difference_body"]

_FIGURES: Sequence[tuple[str, Callable[[ValueChanges], str]]] = (
    ("changed", lambda change: f"{count(change.changed)} of {count(change.of)}"),
    ("mean A", lambda change: number(change.mean_a)),
    ("mean B", lambda change: number(change.mean_b)),
    ("mean |B − A|", lambda change: number(change.mean_change)),
    ("largest |B − A|", lambda change: number(change.max_change)),
    ("sign changed", lambda change: count(change.sign_flips)),
    ("correlation", lambda change: number(change.correlation)),
)


def difference_body(difference: Difference, a: str, b: str) -> list[Child]:
    """From dataset `a` to dataset `b`."""
    if difference.is_empty:
        return [
            element(
                "p", f"No difference: {difference.rows.both} rows of {difference.rollouts.both} rollouts.", class_="ok"
            )
        ]
    values = {"reward of rollouts": difference.rewards, "advantage of rows": difference.advantages}
    others = ", ".join(f"{name} ({rows})" for name, rows in difference.columns.items())
    return [
        element("p", f"A is {a}, B is {b}."),
        _changes("settings", difference.settings),
        _overlaps({"rollouts": difference.rollouts, "rows": difference.rows}),
        _values(values) if difference.rewards.of else None,
        _changes("largest changes of an advantage", difference.advantages.largest),
        _changes("largest changes of a reward", difference.rewards.largest),
        element("p", f"Other columns that differ in common rows: {others}.") if others else None,
        element("p", "The common rows are in a different order.") if difference.order_differs else None,
    ]


def _values(values: dict[str, ValueChanges]) -> Element:
    rows: list[list[Child]] = [[name, *map(figure, values.values())] for name, figure in _FIGURES]
    return table(["in both", *values], rows, caption="values")


def _changes(title: str, changes: Sequence[ItemChange]) -> Element | None:
    if not changes:
        return None
    return table(
        [title, "A", "B"],
        [[change.what, plain(change.before), plain(change.after)] for change in changes],
        caption=title,
    )


def _overlaps(overlaps: dict[str, Overlap]) -> Element:
    rows: list[Sequence[Child]] = []
    for name, overlap in overlaps.items():
        rows.append([name, count(overlap.only_a), count(overlap.only_b), count(overlap.both)])
        rows.extend([f"in B: {reason}", count(n), "", ""] for reason, n in overlap.why_not_in_b.items())
        rows.extend([f"in A: {reason}", "", count(n), ""] for reason, n in overlap.why_not_in_a.items())
    return table(["", "only A", "only B", "both"], rows, caption="what they have in common")

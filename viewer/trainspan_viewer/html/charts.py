"""Small plots as SVG elements: a histogram, horizontal bars, a sparkline. Colors come from the page's style."""

from collections.abc import Iterable, Sequence

from trainspan_schemas.artifacts.manifest import Distribution
from trainspan_viewer.html.curves import MOST
from trainspan_viewer.html.elements import Element, element, link, svg
from trainspan_viewer.html.formats import number

__all__ = ["bars", "dots", "histogram", "sparkline"]

_WIDTH, _HEIGHT = 300, 110


def histogram(caption: str, values: Distribution) -> Element | None:
    """N bars between N + 1 edges, each as wide as its bin, above the least and the greatest value; None without values."""
    if not values["n"]:
        return None
    edges, counts = values["edges"], values["counts"]
    greatest = max(counts, default=0)
    drawn: list[Element] = []
    for index, count in enumerate(counts):
        if not count:
            continue
        height = max(1.0, (_HEIGHT - 36) * count / greatest)
        width = _WIDTH / len(counts)
        bar = element(
            "rect",
            element("title", f"{_bin(edges[index], edges[index + 1])}: {count}"),
            class_="bar",
            x=round(index * width + 0.5, 2),
            y=round(_HEIGHT - 18 - height, 2),
            width=round(max(1.0, width - 1), 2),
            height=round(height, 2),
        )
        drawn.append(bar)
    base = _HEIGHT - 18
    axis = element("line", class_="axis", x1=0, y1=base, x2=_WIDTH, y2=base)
    labels = [
        element("text", number(values["min"] or 0.0), x=0, y=_HEIGHT - 4),
        element("text", number(values["max"] or 0.0), x=_WIDTH, y=_HEIGHT - 4, **{"text-anchor": "end"}),
        element("text", f"most: {greatest}", x=_WIDTH, y=10, **{"text-anchor": "end"}),
    ]
    return _figure(caption, _HEIGHT, [*drawn, axis, *labels])


def bars(caption: str, items: Sequence[tuple[str, int, str]]) -> Element:
    """One bar per (label, count, CSS class for its color), all on the same scale."""
    greatest = max((count for _, count, _ in items), default=0) or 1
    drawn: list[Element] = []
    for row, (label, count, color) in enumerate(items):
        y = 18 * row
        width = round(150 * count / greatest, 2)
        drawn.append(element("text", label, x=0, y=y + 12))
        drawn.append(element("rect", class_=color, x=140, y=y + 3, width=max(width, 0.5), height=11))
        drawn.append(element("text", count, x=round(146 + width, 2), y=y + 12))
    return _figure(caption, 18 * len(items) + 4, drawn, width=350)


def sparkline(points: Sequence[tuple[float, float]], label: str) -> Element:
    """(x, y) as a line without axes; `label` and the ends are its text."""
    width, height = 110, 24
    (left, right), (low, high) = _range(x for x, _ in points), _range(y for _, y in points)
    places = [
        (3 + (width - 6) * (x - left) / (right - left), height - 3 - (height - 6) * (y - low) / (high - low))
        for x, y in points
    ]
    text = f"{label}: from {number(points[0][1])} to {number(points[-1][1])}"
    return svg(
        width,
        height,
        text,
        element("title", text),
        element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places), class_="line c0"),
        element("circle", cx=round(places[-1][0], 1), cy=round(places[-1][1], 1), r=2.5, class_="dot c0"),
    )


def dots(marks: Sequence[tuple[float, str, str, bool]], ends: tuple[float, float], label: str) -> Element:
    """(value, address, text, whether it is filled) as dots between `ends`; almost equal values are stacked.

    Values that are not finite, or beyond `curves.MOST`, have no dot.
    """
    width, step, abreast = 220, 7, 4
    marks = [mark for mark in marks if abs(mark[0]) <= MOST]
    low, high = _range(min(max(end, -MOST), MOST) for end in ends)
    stacks: dict[int, int] = {}
    placed = []
    cells = (width - 16) // (step * abreast) - 1
    for value, address, text, is_filled in marks:
        cell = round(cells * (value - low) / (high - low))
        in_cell = stacks.get(cell, 0)
        stacks[cell] = in_cell + 1
        x = 8 + step * (abreast * cell + in_cell % abreast)
        placed.append((x, in_cell // abreast, address, text, is_filled))
    height = 6 + step * (1 + max((level for _, level, _, _, _ in placed), default=0))
    drawn = [
        link(
            address,
            element(
                "circle",
                element("title", text),
                cx=x,
                cy=height - 4 - step * level,
                r=3,
                class_="dot c0" if is_filled else "hollow",
            ),
            aria_label=text,
        )
        for x, level, address, text, is_filled in placed
    ]
    return svg(
        width,
        height,
        label,
        element("line", class_="rule", x1=2, x2=width - 2, y1=height - 0.5, y2=height - 0.5),
        *drawn,
        role="group",
    )


def _range(values: Iterable[float]) -> tuple[float, float]:
    """The least and the greatest value, apart from each other."""
    finite = list(values)
    low, high = min(finite), max(finite)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _figure(caption: str, height: int, drawn: Sequence[Element], width: int = _WIDTH) -> Element:
    return element("figure", element("figcaption", element("b", caption)), svg(width, height, caption, *drawn))


def _bin(low: float, high: float) -> str:
    middle = (low + high) / 2
    return number(middle) if high - low == 1 and middle == round(middle) else f"{number(low)} to {number(high)}"

"""Line charts as SVG: values by round, with 95 % intervals as bands; colors come from the style sheet."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from trainspan_viewer.html.elements import Element, element, svg
from trainspan_viewer.html.formats import number

__all__ = ["MOST", "Curve", "Point", "chart"]

_LEFT, _TOP, _BOTTOM, _RIGHT = 46, 8, 34, 10
_COLORS: Final = 8
_MOST_DOTS: Final = 60
"""Longer curves get no dots."""

_LONG: Final = 10**15
"""Numbers on the x axis from here on are rounded."""
MOST: Final = 1e300
"""Values beyond it are left out like those that are not finite: differences of two of them would overflow."""

_Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Point:
    """A value; `low` and `high` are the ends of its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""
    """Shown next to the pointer, instead of the value."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line and its name in the legend."""

    name: str
    points: Sequence[Point]
    color: int | None = None
    """0 to 7; None: its place among the curves."""


def chart(
    caption: str,
    curves: Sequence[Curve],
    *,
    limits: tuple[float, float] | None = None,
    is_log: bool = False,
    x_name: str = "round",
    size: tuple[int, int] = (430, 204),
) -> Element | None:
    """The curves over a common x axis; None if there is no finite value.

    `x_name` is written below the x axis. `limits` are the ends of the y axis, else those of
    the values. With `is_log`, values of 0 or less are left out.
    """
    colored = [
        (index if curve.color is None else curve.color, curve.name, _finite(curve.points, is_log=is_log))
        for index, curve in enumerate(curves)
    ]
    shown = [(color, name, points) for color, name, points in colored if points]
    if not shown:
        return None
    width, height = size
    every = [point for _, _, points in shown for point in points]
    left, right = _ends(point.x for point in every)
    values = [value for point in every for value in (point.y, point.low, point.high) if value is not None]
    values = [value for value in values if abs(value) <= MOST and (value >= 1 / MOST or not is_log)]
    low, high = limits or _ends(values, is_log=is_log)

    def x_of(value: float) -> float:
        return _LEFT + (width - _LEFT - _RIGHT) * (value - left) / (right - left)

    def y_of(value: float) -> float:
        at, first, last = (math.log(max(y, low)) for y in (value, low, high)) if is_log else (value, low, high)
        part = (at - first) / (last - first)
        return _TOP + (height - _TOP - _BOTTOM) * (1 - min(max(part, -0.02), 1.02))

    drawn = _y_axis([(y_of(value), text) for value, text in _ticks(low, high, is_log=is_log)], width)
    ticks = _whole_ticks(left, right, 8 if width > 300 else 4)
    drawn += _x_axis([(x_of(value), value, value == right) for value in ticks], x_name, size)
    for color, name, points in shown:
        drawn += _curve(name, points, x_name, f"c{color % _COLORS}", x_of, y_of)
    drawing = svg(width, height, f"{caption}. {_described(shown, x_name)}", *drawn, class_="curves")
    legend = [
        element("span", element("i", class_=f"key c{color % _COLORS}"), f" {name}", class_="named")
        for color, name, _ in shown
        if len(curves) > 1
    ]
    return element("figure", element("figcaption", element("b", caption), *legend), drawing)


def _y_axis(ticks: Sequence[tuple[float, str]], width: int) -> list[Element]:
    """A line and a text at the height of each tick."""
    drawn = []
    for height, text in ticks:
        y = round(height, 1)
        drawn.append(element("line", class_="rule", x1=_LEFT, x2=width - _RIGHT, y1=y, y2=y))
        drawn.append(element("text", text, x=_LEFT - 5, y=y + 4, **{"text-anchor": "end"}))
    return drawn


def _x_axis(ticks: Sequence[tuple[float, int, bool]], name: str, size: tuple[int, int]) -> list[Element]:
    """The axis with its name, and a number at each tick; a tick is (x, value, whether it is at the right end)."""
    right, bottom = size[0] - _RIGHT, size[1] - _BOTTOM
    drawn = []
    for x, value, is_last in ticks:
        anchor = {"text-anchor": "end" if is_last else "middle"}
        text = value if abs(value) < _LONG else number(value)
        drawn.append(element("text", text, x=round(x, 1), y=bottom + 15, **anchor))
    drawn.append(element("text", name, x=(_LEFT + right) // 2, y=size[1] - 4, **{"text-anchor": "middle"}))
    return [*drawn, element("line", class_="axis", x1=_LEFT, x2=right, y1=bottom, y2=bottom)]


def _curve(name: str, points: Sequence[Point], x_name: str, color: str, x_of: _Scale, y_of: _Scale) -> list[Element]:
    drawn = []
    with_interval = [point for point in points if point.low is not None and point.high is not None]
    if len(with_interval) > 1:
        upper = [f"{x_of(point.x):.1f},{y_of(point.high or 0.0):.1f}" for point in with_interval]
        lower = [f"{x_of(point.x):.1f},{y_of(point.low or 0.0):.1f}" for point in reversed(with_interval)]
        drawn.append(element("polygon", points=" ".join([*upper, *lower]), class_=f"band {color}"))
    elif with_interval:
        (only,) = with_interval
        x = round(x_of(only.x), 1)
        ends = {"y1": round(y_of(only.low or 0.0), 1), "y2": round(y_of(only.high or 0.0), 1)}
        drawn.append(element("line", class_=f"whisker {color}", x1=x, x2=x, **ends))
    if len(points) > 1:
        positions = " ".join(f"{x_of(point.x):.1f},{y_of(point.y):.1f}" for point in _thinned(points))
        drawn.append(element("polyline", points=positions, class_=f"line {color}"))
    if len(points) <= _MOST_DOTS:
        drawn += [
            element(
                "circle",
                element("title", point.text or f"{name}, {x_name} {point.x:g}: {_value_text(point)}"),
                cx=round(x_of(point.x), 1),
                cy=round(y_of(point.y), 1),
                r=2.6,
                class_=f"dot {color}",
            )
            for point in points
        ]
    return drawn


def _finite(points: Sequence[Point], *, is_log: bool) -> list[Point]:
    return [
        point
        for point in points
        if abs(point.x) <= MOST and abs(point.y) <= MOST and (point.y >= 1 / MOST or not is_log)
    ]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    step = max(1, len(points) // 400)
    return points if step == 1 else [*points[::step], points[-1]]


def _ends(values: Iterable[float], *, is_log: bool = False) -> tuple[float, float]:
    """The least and the greatest, apart from each other."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    if is_log:
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** max(
            math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1
        )
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, 1e-200):
        room = 0.04 * (high - low)
        return (low if low == 0 else low - room), high + room
    half = max(0.5, 0.1 * size)
    return low - half, high + half


def _ticks(low: float, high: float, *, is_log: bool) -> list[tuple[float, str]]:
    if is_log:
        first, last = round(math.log10(low)), round(math.log10(high))
        powers = max(1, (last - first) // 4)
        return [
            (10.0**power, f"1e{power}" if abs(power) > 3 else f"{10.0**power:g}")
            for power in range(first, last + 1, powers)
        ]
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step: float = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    lowest = math.ceil(low / step - 1e-9)
    ticks = [(lowest + index) * step for index in range(7)]
    return [(value, number(0.0 if abs(value) < step / 1e6 else value)) for value in ticks if value <= high + step / 1e6]


def _whole_ticks(left: float, right: float, most: int) -> list[int]:
    first, last = math.ceil(left), math.floor(right)
    step = max(1, math.ceil((last - first) / most)) if last > first else 1
    return list(range(first, last + 1, step))


def _described(shown: Sequence[tuple[int, str, Sequence[Point]]], x_name: str) -> str:
    return "; ".join(
        f"{name}: from {_value_text(points[0])} at {x_name} {points[0].x:g} to {_value_text(points[-1])} at {x_name} {points[-1].x:g}"
        for _, name, points in shown
    )


def _value_text(point: Point) -> str:
    interval = (
        f" [{number(point.low)}, {number(point.high)}]" if point.low is not None and point.high is not None else ""
    )
    return f"{number(point.y)}{interval}"

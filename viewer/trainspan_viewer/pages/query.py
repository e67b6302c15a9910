"""Read-only SQL on the store's views, with a table and a simple chart. The script keeps queries in the browser."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlencode

from trainspan_viewer.html.charts import bars
from trainspan_viewer.html.curves import MOST, Curve, Point, chart
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, link, table
from trainspan_viewer.html.formats import count, number, seconds
from trainspan_viewer.queries.query import EXAMPLES, QueryModel
from trainspan_viewer.queries.store import QueryRows

__all__ = ["render_query"]

_MOST_CHARACTERS: Final = 200
_MOST_BARS: Final = 40


def render_query(model: QueryModel) -> Page:
    body: list[Child] = [
        _form(model),
        element("p", model.error, class_="bad", role="alert") if model.error else None,
        element("p", model.note, class_="warn", role="status") if model.note else None,
        *(_result(model, model.result) if model.result else []),
        _reference(model),
    ]
    return Page("Query", body, section="query")


def _form(model: QueryModel) -> Element:
    examples = [
        part for name, sql in EXAMPLES.items() for part in (link(f"/query?{urlencode({'sql': sql})}", name), " · ")
    ][:-1]
    return element(
        "form",
        element(
            "label",
            "one SELECT on the views spans, logs, calls, evaluations, rollouts",
            element("textarea", model.sql, name="sql", rows=6, spellcheck="false", id="sql"),
            class_="wide",
        ),
        element(
            "p",
            element("button", "run", type="submit", title="Ctrl+Enter"),
            element("span", "", id="saved", hidden=True),
            class_="pages",
        ),
        element("p", "examples: ", *examples, class_="note"),
        action="/query",
        method="get",
        id="query",
    )


def _result(model: QueryModel, result: QueryRows) -> list[Child]:
    said = f"{count(len(result.rows))} rows in {seconds(model.took_s)}"
    if result.is_cut:
        said = f"the first {said}; there are more"
    if result.is_behind:
        said += "; spans have arrived that are not loaded yet"
    numeric = {place for place, name in enumerate(result.columns) if name in model.y or _is_number(result, place)}
    text = frozenset(place for place in range(len(result.columns)) if place not in numeric)
    rows = [[_cell(name, value) for name, value in zip(result.columns, row, strict=True)] for row in result.rows]
    return [
        element("p", said, class_="note", role="status"),
        _chart(model, result),
        table(result.columns, rows, text=text, caption="result"),
    ]


def _is_number(result: QueryRows, place: int) -> bool:
    return any(isinstance(row[place], int | float) for row in result.rows[:20])


def _cell(name: str, value: Any) -> Child:
    if value is None:
        return "–"
    if isinstance(value, float):
        return number(value, 6)
    shown = value.hex() if isinstance(value, bytes) else str(value)
    cut = shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}… ({len(shown)} characters)"
    if name == "rollout_id" and isinstance(value, str) and value.replace("-", "").isalnum():
        return link(f"/rollouts/{value}", cut)
    return cut


def _chart(model: QueryModel, result: QueryRows) -> Element | None:
    if model.kind == "none" or not model.y or len(result.rows) < 2:
        return None
    places = {name: place for place, name in enumerate(result.columns)}
    values = [row[places[model.x]] for row in result.rows]
    pairs = list(zip(values, result.rows, strict=True))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values) and model.kind == "line":
        drawn = [
            chart(
                f"{name} by {model.x}",
                [Curve(name, [Point(x, row[places[name]]) for x, row in pairs if _fits(row[places[name]])], color)],
                x_name=model.x,
            )
            for color, name in enumerate(model.y)
        ]
    else:
        first = model.y[0]
        items = [(str(x)[:20], row[places[first]], "bar") for x, row in pairs]
        shown = [(label, value, kind) for label, value, kind in items if _fits(value) and value >= 0][:_MOST_BARS]
        n_left = len(items) - len(shown)
        left_out = f", without {count(n_left)} other rows: at most {_MOST_BARS} numbers from 0 on" if n_left else ""
        drawn = [bars(f"{first} by {model.x}{left_out}", shown) if shown else None]
    return _with_choices(model, result, drawn)


def _with_choices(model: QueryModel, result: QueryRows, drawn: Sequence[Element | None]) -> Element:
    form = element(
        "form",
        element("input", type="hidden", name="sql", value=model.sql),
        _select("x", "x", result.columns, model.x),
        _select("y", "y", [name for place, name in enumerate(result.columns) if _is_number(result, place)], model.y[0]),
        _select("chart", "chart", model.kinds, model.kind),
        element("button", "draw", type="submit"),
        action="/query",
        method="get",
        class_="filters",
    )
    return element("div", element("div", *drawn, class_="plots"), form)


def _select(label: str, name: str, choices: Any, chosen: str) -> Element:
    options = [element("option", choice, value=choice, selected=choice == chosen) for choice in choices]
    return element("label", label, element("select", *options, name=name))


def _fits(value: Any) -> bool:
    """Whether a chart can show it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST


def _reference(model: QueryModel) -> Element:
    rows: list[list[Child]] = [
        [name, ", ".join(f"{column} {kind}" for column, kind in columns.items())]
        for name, columns in model.views.items()
    ]
    return element(
        "details",
        element("summary", "the views and their columns"),
        table(["view", "columns"], rows, text=frozenset({0, 1}), caption="views"),
        open=not model.sql,
    )

"""Elements of pages. Pages are built from them and never by concatenation, so that the serializer escapes every text.

Text is made visible first: it cannot reorder a page (see safe_text.py). An element cannot have a handler or a style attribute,
and every address is a path on this server, so that no text becomes code or a foreign link.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from xml.etree import ElementTree

from trainspan_processing.text.safe_text import visible
from trainspan_viewer.html.formats import cut

__all__ = [
    "Child",
    "Element",
    "element",
    "filter_form",
    "isolated",
    "link",
    "listed",
    "sql_command",
    "svg",
    "table",
]

Element = ElementTree.Element
Child = Element | str | int | None

_MOST_NAME: Final = 2_000
"""Characters of one text or attribute, except in the elements and attributes below, whose texts are cut where they are made."""
_LONG: Final = frozenset({"pre", "textarea", "style"})
_LONG_ATTRIBUTES: Final = frozenset({"href", "src", "action", "value", "content", "points"})
_ADDRESSES: Final = frozenset({"href", "src", "action", "formaction"})
_OWN: Final = re.compile(r"/(?![/\\])|[#?]")
"""The beginning of a path on this server, a fragment or a query."""


def element(tag: str, /, *children: Child, **attributes: str | float | bool | None) -> Element:
    """An element; `class_="x"` becomes the attribute class, `stroke_width` becomes stroke-width.

    Children and attributes that are None or False are skipped; an attribute that is True has no value.
    Raises ValueError for an attribute that could run code or lead to another site.
    """
    built = Element(tag)
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name, text = key.removesuffix("_").replace("_", "-"), "" if value is True else str(value)
        is_long = name in _LONG_ATTRIBUTES or name.startswith("data-")
        text = visible(text if is_long else cut(text, _MOST_NAME))
        if name == "style" or name.startswith("on"):
            raise ValueError(f"the attribute {name} is not allowed: use a class, or app.js")
        if name in _ADDRESSES and not _OWN.match(text):
            raise ValueError(f"the address {text[:80]!r} is not a path on this server")
        built.set(name, text)
    for child in children:
        if isinstance(child, ElementTree.Element):
            built.append(child)
        elif child is not None:
            _append_text(built, visible(str(child) if tag in _LONG else cut(str(child), _MOST_NAME)))
    if tag in ("pre", "textarea") and (built.text or "").startswith("\n"):
        built.text = f"\n{built.text}"  # a browser drops a line feed right after the tag
    return built


def link(href: str, *children: Child, **attributes: str | float | bool | None) -> Element:
    """A link within this server; a page that is a file shows only its text."""
    return element("a", *children, href=href, **attributes)


def isolated(text: object) -> Element:
    """A text that somebody else chose, within a line: letters that run from right to left reorder nothing beside it."""
    return element("bdi", str(text))


def listed(texts: Iterable[object]) -> list[Child]:
    """Texts that somebody else chose, separated by commas."""
    parts: list[Child] = []
    for text in texts:
        parts += [", ", isolated(text)] if parts else [isolated(text)]
    return parts


def sql_command(sql: str, shows: str) -> Element:
    """The command line that runs a SELECT on the store, folded under what it `shows`."""
    quoted = shlex.quote(sql) if set(sql) & set('"$`\\!') else f'"{sql}"'
    return element("details", element("summary", shows), element("pre", f"trainspan sql {quoted}"))


def table(
    head: Sequence[Child],
    rows: Iterable[Sequence[Child]],
    *,
    text: frozenset[int] = frozenset({0}),
    this: int = -1,
    caption: str | None = None,
) -> Element:
    """A table that scrolls by itself if it is too wide; columns in `text` are left-aligned, row `this` is highlighted."""
    columns = [
        element("th", value, class_="l" if column in text else "r", scope="col") for column, value in enumerate(head)
    ]
    body = [
        element(
            "tr",
            *(element("td", value, class_="l" if column in text else "r") for column, value in enumerate(row)),
            class_="this" if number == this else None,
        )
        for number, row in enumerate(rows)
    ]
    parts = [
        element("caption", caption) if caption else None,
        element("thead", element("tr", *columns)) if any(value not in ("", None) for value in head) else None,
        element("tbody", *body),
    ]
    return element(
        "div", element("table", *parts), class_="scroll", tabindex=0, role="region", aria_label=caption or "table"
    )


def filter_form(address: str, fields: Mapping[str, str]) -> Element:
    """A form that shows the page at `address` for other values of these parameters (name → value)."""
    return element(
        "form",
        *(
            element("label", name, element("input", name=name, value=value, size=24 if name == "run" else 6))
            for name, value in fields.items()
        ),
        element("button", "show", type="submit"),
        link(address, "clear"),
        method="get",
        class_="filters",
    )


def svg(width: int, height: int, label: str, *children: Child, role: str = "img", class_: str | None = None) -> Element:
    """A drawing of this size in pixels; `label` says what it shows."""
    return element(
        "svg",
        *children,
        width=width,
        height=height,
        role=role,
        class_=class_,
        aria_label=label,
        viewBox=f"0 0 {width} {height}",
    )


def _append_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text

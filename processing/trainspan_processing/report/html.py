"""Pages without scripts, built from elements and never by concatenation, so that the serializer escapes every text.

The content security policy of a page is `default-src 'none'`: nothing is loaded and nothing runs. Its one style element is
allowed by hash; `style` attributes are not allowed. Pictures are part of the page.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from trainspan_processing.text.safe_text import visible

__all__ = ["STYLE", "Child", "Element", "element", "page", "picture", "table"]

Element = ElementTree.Element
Child = Element | str | int | None

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2rem } h3 { font-size: 1rem; margin-bottom: .3rem }
table { border-collapse: collapse; margin: .8rem 0; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #d8dee4; text-align: right; vertical-align: top }
th { color: #57606a; font-weight: 600 } td.r, th { white-space: nowrap } th.l, td.l { text-align: left } tr.this td { background: #fff8c5 }
code, pre { font: 12.5px/1.6 ui-monospace, monospace } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 }
.note { color: #57606a } .bad { color: #cf222e } .plots { display: flex; flex-wrap: wrap; gap: 1.2rem 2rem }
figure { margin: 0 } figcaption { font-size: 13px; color: #57606a } svg text { font: 11px system-ui, sans-serif; fill: #57606a }
svg .bar { fill: #0969da } svg .lost { fill: #cf222e } svg .axis { stroke: #8c959f } svg .kept { fill: #1a7f37 }
"""


def element(tag: str, /, *children: Child, **attributes: str | int | float) -> Element:
    """An element; `class_="x"` becomes the attribute class, `stroke_width` becomes stroke-width. Children that are None are
    skipped."""
    made = Element(tag, {_attribute(key): visible(str(value)) for key, value in attributes.items()})
    for child in children:
        if isinstance(child, ElementTree.Element):
            made.append(child)
        elif child is not None:
            _append_text(made, visible(str(child)))
    return made


def page(title: str, *body: Child, style: str = "") -> str:
    """A whole HTML document; `style` is the caller's own CSS and must not contain untrusted text."""
    css = STYLE + style
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    content = element("body", *body)
    images = "img-src data:; " if content.find(".//img") is not None else ""
    policy = f"default-src 'none'; {images}style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    document = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", **{"http-equiv": "Content-Security-Policy", "content": policy}),
            element("meta", name="referrer", content="no-referrer"),
            element("meta", name="viewport", content="width=device-width"),
            element("title", title),
        ),
        content,
        lang="en",
    )
    sheet = Element("style")
    sheet.text = css
    document[0].append(sheet)
    return "<!doctype html>\n" + ElementTree.tostring(document, encoding="unicode", method="html") + "\n"


def picture(file: Path, text: str) -> Element:
    """A PNG file, embedded; `text` says what it shows."""
    image = base64.b64encode(file.read_bytes()).decode()
    return element("p", element("img", alt=text, src=f"data:image/png;base64,{image}"))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Child]],
    *,
    text: frozenset[int] = frozenset({0}),
    this: int = -1,
) -> Element:
    """A table; columns in `text` are left-aligned, row `this` is highlighted."""
    return element(
        "table",
        _row("th", head, text),
        *(_row("td", row, text, marked=number == this) for number, row in enumerate(rows)),
    )


def _row(cell: str, values: Sequence[Child], text: frozenset[int], *, marked: bool = False) -> Element:
    cells = [element(cell, value, class_="l" if column in text else "r") for column, value in enumerate(values)]
    return element("tr", *cells, class_="this" if marked else "row")


def _attribute(key: str) -> str:
    return key.removesuffix("_").replace("_", "-")


def _append_text(made: Element, text: str) -> None:
    if len(made):
        made[-1].tail = (made[-1].tail or "") + text
    else:
        made.text = (made.text or "") + text

"""Whole documents: a page of the server with its navigation, or a file that can be opened without a server.

Both have a content security policy that runs no inline script. A file loads nothing: its style sheet is part of it, allowed by
hash, and its policy is a meta element. The server's pages load `/static/style.css` and `/static/app.js`; their policy is a header.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final
from xml.etree import ElementTree

from trainspan_viewer.html.elements import Child, Element, element, link

__all__ = ["SECTIONS", "Page", "served", "standalone", "static_file"]

SECTIONS: Final = {"runs": "/", "datasets": "/datasets", "live": "/live", "labels": "/labels", "judges": "/judges"}
"""Entries of the navigation → their addresses."""


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a document, apart from navigation and style sheet."""

    title: str
    body: Sequence[Child]
    section: str = ""
    """The current entry of the navigation."""
    crumbs: Sequence[tuple[str, str]] = ()
    """Text and address of the pages above this one."""
    live: str | None = None
    """Address that the script asks for changes: the element `#live` is replaced by the one of the new document."""
    is_waiting: bool = False
    """Whether this is the waiting page: the script loads the real one once it is ready."""


@cache
def static_file(name: str) -> bytes:
    """A file of `static/`. Raises FileNotFoundError."""
    return (files("trainspan_viewer") / "static" / name).read_bytes()


def served(page: Page, version: str = "") -> str:
    """The document of the server; `version` changes with the static files, so that browsers may keep them."""
    suffix = f"?v={version}" if version else ""
    head = element(
        "head",
        *_meta(page, "same-origin"),
        element("link", rel="stylesheet", href=f"/static/style.css{suffix}"),
        element("link", rel="icon", href="/static/icon.png"),
        element("script", src=f"/static/app.js{suffix}", type="module"),
    )
    entries = [
        link(address, name, aria_current="page" if name == page.section else None) for name, address in SECTIONS.items()
    ]
    header = element(
        "header",
        link("#content", "Skip to content", class_="skip"),
        link("/", "trainspan", class_="name"),
        element("nav", *entries, aria_label="pages"),
        element(
            "button", "◐", type="button", id="theme", title="light or dark", aria_label="light or dark", hidden=True
        ),
    )
    crumbs = (
        element("p", *(part for text, address in page.crumbs for part in (link(address, text), " › ")), class_="crumbs")
        if page.crumbs
        else None
    )
    main = element("main", crumbs, element("h1", page.title), *page.body, id="content", data_live=page.live)
    if page.is_waiting:
        main.set("data-waiting", "")
    return _serialized(element("html", head, element("body", header, main), lang="en"))


def standalone(page: Page, style: str = "") -> str:
    """The document as one file: without scripts, and with links as text. `style` is further CSS, never untrusted text."""
    css = static_file("style.css").decode() + style
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    main = element("main", element("h1", page.title), *page.body, id="content")
    for anchor in main.iter("a"):
        if not anchor.get("href", "#").startswith("#"):
            anchor.tag = "span"
            del anchor.attrib["href"]
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element("head", *_meta(page, "no-referrer"))
    head.insert(1, element("meta", **{"http-equiv": "Content-Security-Policy", "content": policy}))
    sheet = Element("style")
    sheet.text = css
    head.append(sheet)
    return _serialized(element("html", head, element("body", main), lang="en"))


def _meta(page: Page, referrer: str) -> list[Element]:
    return [
        element("meta", charset="utf-8"),
        element("meta", name="referrer", content=referrer),
        element("meta", name="viewport", content="width=device-width"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{page.title} · trainspan"),
    ]


def _serialized(document: Element) -> str:
    return "<!doctype html>\n" + ElementTree.tostring(document, encoding="unicode", method="html") + "\n"

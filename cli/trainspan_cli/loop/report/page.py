"""A self-contained HTML page without scripts or external resources; all text is escaped."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

__all__ = ["picture", "table", "write_page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right }
th:first-child, td:first-child, .text td:last-child, .text th:last-child { text-align: left }
.ok { color: #1a7f37 } .bad { color: #cf222e; font-weight: 600 }
"""


def write_page(path: Path, title: str, parts: Sequence[str]) -> Path:
    """Writes `parts` (HTML) under a heading; returns `path`."""
    head = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
    ]
    path.write_text("\n".join([*head, *parts, "</html>"]), encoding="utf-8")
    return path


def picture(path: Path, text: str) -> str:
    """Embeds a PNG file in the page."""
    image = base64.b64encode(path.read_bytes()).decode()
    return f"<p><img alt='{escape(text)}' src='data:image/png;base64,{image}'></p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "figures") -> str:
    """An HTML table; `kind` "text" aligns the last column to the left."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table class='{kind}'><tr>{header}</tr>{body}</table>"

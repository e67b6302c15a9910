"""Pages of the loop: the elements and the policy of `trainspan_processing.report.html`, with the style of a report."""

from pathlib import Path
from typing import Final

from trainspan_processing.report.html import Child, element, page

__all__ = ["write_page"]

_STYLE: Final = """
img { max-width: 100% } .ok { color: #1a7f37 } .bad { font-weight: 600 } td.r { white-space: normal }
"""


def write_page(path: Path, title: str, *body: Child) -> Path:
    """Writes the body under a heading; returns `path`."""
    path.write_text(page(title, element("h1", title), *body, style=_STYLE), encoding="utf-8")
    return path

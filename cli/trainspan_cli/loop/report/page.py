"""Pages of the loop, as files."""

from pathlib import Path

from trainspan_viewer.html.document import Page, standalone
from trainspan_viewer.html.elements import Child

__all__ = ["write_page"]


def write_page(path: Path, title: str, *body: Child) -> Path:
    """Writes the body under a heading; returns `path`."""
    path.write_text(standalone(Page(title, body)), encoding="utf-8")
    return path

"""`report.html`: the page of a run as a file, with all its rounds and the verdicts on it."""

from collections.abc import Sequence

from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, element
from trainspan_viewer.pages.run.run import sections
from trainspan_viewer.queries.run import whole_run
from trainspan_viewer.queries.runs import RunRecords

__all__ = ["render_report"]


def render_report(run: RunRecords, title: str, verdicts: Sequence[tuple[str, bool, str]]) -> Page:
    """The page; each verdict has a name, whether it holds, and a detail."""
    body: list[Child] = []
    if verdicts:
        items = [
            element("li", f"{'✓' if holds else '✗'} {name}: {detail}", class_="ok" if holds else "bad")
            for name, holds, detail in verdicts
        ]
        body = [element("h2", "Verdict"), element("ul", *items), element("h2", "The run")]
    return Page(title, [*body, *sections(whole_run(run))])

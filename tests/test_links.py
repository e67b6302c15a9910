"""Every link between the pages of the repository leads to a file, and to a heading in it if the link names one."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT

PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
)


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        is_dead = not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target))
        if "://" not in link and is_dead:
            dead.append(link)
    assert dead == []


def test_there_are_pages() -> None:
    assert len(PAGES) > 20

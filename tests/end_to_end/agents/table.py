"""Writes the tables of `docs/agents.md` from the latest results: `python -m tests.end_to_end.agents.table`, after the tests."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.end_to_end.agents.cases import CASES, FRAMEWORKS, INSTRUMENTORS, Case
from tests.support.places import ROOT

__all__ = ["PAGE", "RESOLVED", "put", "remember", "resolved", "table"]

PAGE = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- frameworks: written by python -m tests.end_to_end.agents.table -->\n", "<!-- end of frameworks -->\n"
BEGIN_RESOLVED, END_RESOLVED = BEGIN.replace("frameworks", "installation"), END.replace("frameworks", "installation")
RESOLVED = "resolved"
"""The folder of the cache where `test_releases.py` keeps its results."""


def remember(cache: pytest.Cache, case: Case, calls: int) -> None:
    """Records that a case passed, and its number of calls."""
    cache.set(f"frameworks/{case.name}", calls)


def table(results: dict[str, int]) -> str:
    """Rows are framework and mode, columns the instrumentors; a cell is the number of exact calls."""
    lines = ["| agent | mode | " + " | ".join(INSTRUMENTORS.values()) + " |"]
    lines.append("|---" * (2 + len(INSTRUMENTORS)) + "|")
    for name, framework in FRAMEWORKS.items():
        for asynchronous, streaming in framework.modes:
            mode = ("asynchronous" if asynchronous else "synchronous") + (", streaming" if streaming else "")
            cells = []
            for instrumentor in INSTRUMENTORS:
                calls = results.get(Case(name, asynchronous, streaming, instrumentor).name)
                cells.append(
                    f"{calls} of {calls}"
                    if calls
                    else "–"
                    if instrumentor not in framework.instrumentors
                    else "not run"
                )
            lines.append(f"| {framework.title} | {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def resolved(results: Sequence[Mapping[str, str]]) -> str:
    """A row for each framework that was resolved together with the base install."""
    lines = ["| framework | version | OpenTelemetry | fits |", "|---|---|---|---|"]
    for fit in results:
        fits = fit["why_not"] or "yes"
        lines.append(f"| {fit['framework']} | {fit['version']} | {fit['opentelemetry'] or '–'} | {fits} |")
    return "\n".join(lines) + "\n"


def _results(cache: Path) -> dict[str, int]:
    folder = cache / "v" / "frameworks"
    return {case.name: json.loads((folder / case.name).read_text()) for case in CASES if (folder / case.name).exists()}


def put(text: str, begin: str, table: str, end: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not rest:
        sys.exit(f"{PAGE} has no place for the table: {begin!r}")
    return before + begin + table + end + after


if __name__ == "__main__":
    cache = ROOT / ".pytest_cache"
    page = PAGE.read_text()
    if results := _results(cache):
        page = put(page, BEGIN, table(results), END)
    fits = [json.loads(path.read_text()) for path in sorted((cache / "v" / RESOLVED).glob("*"))]
    if fits:
        page = put(page, BEGIN_RESOLVED, resolved(fits), END_RESOLVED)
    PAGE.write_text(page)
    sys.stdout.write(f"{len(results)} of {len(CASES)} cases have passed, {len(fits)} frameworks were resolved\n")

"""Writes the table of `docs/agents.md` from the latest results: `python -m tests.end_to_end.agents.table`, after the tests."""

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.agents.cases import CASES, FRAMEWORKS, INSTRUMENTORS, Case
from tests.support.places import ROOT

__all__ = ["remember", "table"]

PAGE = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- frameworks: written by python -m tests.end_to_end.agents.table -->\n", "<!-- end of frameworks -->\n"


def remember(cache: pytest.Cache, case: Case, calls: int) -> None:
    """Keeps that a case passed, and with how many calls."""
    cache.set(f"frameworks/{case.name}", calls)


def table(results: dict[str, int]) -> str:
    """Rows are framework and mode, columns the instrumentors; a cell says how many calls were exact."""
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


def _results(cache: Path) -> dict[str, int]:
    folder = cache / "v" / "frameworks"
    return {case.name: json.loads((folder / case.name).read_text()) for case in CASES if (folder / case.name).exists()}


if __name__ == "__main__":
    results = _results(ROOT / ".pytest_cache")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest:
        sys.exit(f"{PAGE} has no place for the table: {BEGIN!r}")
    PAGE.write_text(before + BEGIN + table(results) + END + after)
    sys.stdout.write(f"{len(results)} of {len(CASES)} cases have passed\n")

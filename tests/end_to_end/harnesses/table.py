"""Writes the latest results into the matrix in `docs/harnesses.md`: `python -m tests.end_to_end.harnesses.table`.

Rows of cells that have no result here stay as they are.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pytest

from tests.end_to_end.agents.table import put
from tests.end_to_end.harnesses.cases import PACKAGES, TITLES
from tests.support.places import ROOT

__all__ = ["Result", "remember", "table"]

PAGE = ROOT / "docs" / "harnesses.md"
CACHE = "harnesses"
"""The folder of pytest's cache where the tests keep their results."""
BEGIN, END = (
    "<!-- harnesses: written by python -m tests.end_to_end.harnesses.table -->\n",
    "<!-- end of harnesses -->\n",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One harness in one cell that passed."""

    harness: str
    cell: str
    served: int
    """Calls that the policy server counted."""
    stored: int
    trained: int
    segments: int = 0
    titles: int = 0
    sub_agents: int = 0
    summaries: int = 0
    steps: int = 0
    """Tool steps that are joined to the call that asked for them."""
    timed: int = 0
    """Those of them whose duration the harness's own telemetry says."""
    status: str = "ok"
    note: str = ""


def remember(cache: pytest.Cache, result: Result) -> None:
    """Keeps a result for the table."""
    cache.set(f"{CACHE}/{result.harness}-{result.cell.replace(' ', '-')}", asdict(result))


def table(results: Sequence[Result], page: str = "") -> str:
    """A row for each cell that has been run, by harness; those of `page` stay if no result has their harness and cell."""
    lines = ["| harness | version | cell | served, stored, trained | kinds | segments | tool steps joined | status |"]
    lines.append("|---" * 8 + "|")
    rows = {_cell(line): line for line in page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]}
    for result in results:
        package = PACKAGES[result.harness]
        version = package.rpartition("==" if "==" in package else "@")[2]
        counts = f"{result.served}/{result.stored}/{result.trained}"
        cells = (TITLES.get(result.harness, result.harness), version, result.cell, counts, _kinds(result))
        steps = f"{result.steps}" + (f", {result.timed} with duration" if result.timed else "") if result.steps else "–"
        ending = result.status + (f"; {result.note}" if result.note else "")
        line = "| " + " | ".join((*cells, str(result.segments or "–"), steps, ending)) + " |"
        rows[_cell(line)] = line
    order = [TITLES.get(name, name) for name in PACKAGES]
    return (
        "\n".join([*lines, *(rows[cell] for cell in sorted(rows, key=lambda cell: (order.index(cell[0]), cell[1])))])
        + "\n"
    )


def _cell(row: str) -> tuple[str, str]:
    """The harness and the cell of a row."""
    _, harness, _, cell, *_ = (part.strip() for part in row.split("|"))
    return harness, cell


def _kinds(result: Result) -> str:
    special = ((result.titles, "title"), (result.sub_agents, "sub_agent"), (result.summaries, "summary"))
    return ", ".join(f"{count} `{kind}`" for count, kind in special if count) or "all `main`"


def _results() -> list[Result]:
    folder = ROOT / ".pytest_cache" / "v" / CACHE
    records: list[Mapping[str, object]] = [json.loads(path.read_text()) for path in sorted(folder.glob("*"))]
    return [Result(**record) for record in records]  # type: ignore[arg-type]


if __name__ == "__main__":
    seen, text = _results(), PAGE.read_text()
    PAGE.write_text(put(text, BEGIN, table(seen, text), END))
    sys.stdout.write(f"{len(seen)} cells were run\n")

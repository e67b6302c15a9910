"""Writes the matrix's table into `docs/agents.md` from the latest results: `python -m tests.end_to_end.matrix.table`."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tests.end_to_end.agents.table import PAGE, put
from tests.end_to_end.matrix.cases import CASES, UNTRIED, Case
from tests.end_to_end.matrix.environments import PINS
from tests.support.places import ROOT

__all__ = ["CACHE", "Result", "table"]

CACHE = "matrix"
"""The folder of pytest's cache where `test_matrix.py` keeps its results."""
BEGIN = "<!-- matrix: written by python -m tests.end_to_end.matrix.table -->\n"
END = "<!-- end of matrix -->\n"


@dataclass(frozen=True, slots=True)
class Result:
    """One program in one mode, compared with its bare run."""

    mode: str
    served: int
    """Calls that the engine generated."""
    bare_s: float
    traced_s: float
    stored: int = 0
    counted: int | None = 0
    """Calls that the agent's side counted; None for a program in another language, which has no agent's side."""
    status: str = ""
    agents: tuple[str, ...] = ()
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason → calls that the dataset left out for it."""
    wrong: tuple[str, ...] = ()
    """The failures; empty: the case passes."""


def table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """A row for each case that has been run; the others are named below."""
    lines = [
        "| program | version | agent | served, stored, counted | trained, free | trained, strict | bare → traced | wrong |"
    ]
    lines.append("|---" * 8 + "|")
    for case in CASES:
        modes = results.get(case.name)
        if not modes:
            continue
        counts = ", ".join(
            f"{one.served}/{one.stored}/{'–' if one.counted is None else one.counted}" for one in modes.values()
        )
        agents = ", ".join(sorted({_agent(name) for one in modes.values() for name in one.agents}))
        trained = [_trained(modes[mode]) if mode in modes else "–" for mode in ("free", "strict")]
        times = ", ".join(f"{one.bare_s:.1f} → {one.traced_s:.1f} s" for one in modes.values())
        wrong = "; ".join(sorted({_short(what) for one in modes.values() for what in one.wrong})) or "–"
        cells = (case.title, _version(case), agents, counts, *trained, times, wrong)
        lines.append("| " + " | ".join(cells) + " |")
    if missing := [case.title for case in CASES if case.name not in results]:
        lines += ["", f"Their programs exist but have not been run: {', '.join(missing)}."]
    lines += ["", "Not tried: " + "; ".join(f"{name} ({why})" for name, why in UNTRIED.items()) + "."]
    return "\n".join(lines) + "\n"


def _agent(name: str) -> str:
    return "a hash" if name.startswith("agent-") else name


def _trained(result: Result) -> str:
    dropped = ", ".join(f"{reason} {calls}" for reason, calls in result.dropped.items())
    return f"{result.trained} of {result.served}" + (f" ({dropped})" if dropped else "")


def _short(what: str) -> str:
    return " ".join(what.replace("|", "/").split())[:120]


def _version(case: Case) -> str:
    if case.is_node:
        return str(json.loads((PINS / "package.json").read_text())["dependencies"][case.requirements[0]])
    if not case.requirements:
        return "–"
    wanted = re.split(r"[\[<>=]", case.requirements[0])[0]
    pins = dict(line.split("==") for line in (PINS / f"{case.name}.txt").read_text().splitlines() if "==" in line)
    return pins[wanted]


def _results() -> dict[str, dict[str, Result]]:
    folder = ROOT / ".pytest_cache" / "v" / CACHE
    found: dict[str, dict[str, Result]] = {}
    for case in CASES:
        for mode in case.modes:
            path = folder / f"{case.name}-{mode}"
            if path.exists():
                stored: dict[str, Any] = json.loads(path.read_text())
                found.setdefault(case.name, {})[mode] = Result(**{one.name: stored[one.name] for one in fields(Result)})
    return found


if __name__ == "__main__":
    results = _results()
    PAGE.write_text(put(PAGE.read_text(), BEGIN, table(results), END))
    sys.stdout.write(f"{len(results)} of {len(CASES)} cases were run\n")

"""A gate's result as a table, as Markdown for a pull request, and as JUnit XML for a CI system."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from trainspan_schemas.artifacts.gate_result import GateResult, GateSide, Tripwire

__all__ = ["junit_xml", "markdown", "print_result", "write_pages"]

_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SUITE: Final = "trainspan gate"
_METHOD: Final = (
    "Each task is compared under both servers. The evidence may be read after any task (a test martingale, Ville 1939); "
    "once all tasks are used an exact permutation test follows. Together they call a candidate that is as good as the baseline "
    "worse with at most the probability of the level."
)


def print_result(result: GateResult) -> None:
    """Prints the result for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(result.reason, style="bold"))
    table = Table("", "baseline", "candidate", "", box=None)
    for name, baseline, candidate in _sides(result):
        table.add_row(Text(name), Text(baseline), Text(candidate))
    for wire in result.tripwires:
        table.add_row(Text(wire.name), Text(_value(wire.baseline)), Text(_value(wire.candidate)), Text(_remark(wire)))
    console.print(table)
    for line in (*_lines(result), f"run: {_xml(result.run_id)}"):
        console.print(Text(line))
    if result.declines:
        worst = ", ".join(f"{_xml(one.task_id)} {one.baseline:.2f} → {one.candidate:.2f}" for one in result.declines)
        console.print(Text(f"greatest declines: {worst}"))


def write_pages(result: GateResult, folder: Path) -> None:
    """Writes `gate.md` and `gate.xml`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gate.md").write_text(markdown(result), encoding="utf-8")
    (folder / "gate.xml").write_bytes(junit_xml(result))


def markdown(result: GateResult) -> str:
    """The page, verdict first; text from outside stands in code."""
    text = [
        f"**{result.verdict}** · {_plain(result.reason)}",
        "",
        *_table(
            ("", "baseline", "candidate"), [(name, _code(one), _code(other)) for name, one, other in _sides(result)]
        ),
    ]
    text += ["", *(f"- {line}" for line in (*_lines(result), f"run: {_code(result.run_id)}")), "", "### Tripwires", ""]
    wires = [
        (wire.name, _value(wire.baseline), _value(wire.candidate), _plain(_remark(wire))) for wire in result.tripwires
    ]
    text += [*_table(("", "baseline", "candidate", ""), wires), ""]
    if result.declines:
        rows = [(_code(one.task_id), f"{one.baseline:.3f}", f"{one.candidate:.3f}") for one in result.declines]
        text += ["### Greatest declines", "", *_table(("task", "baseline", "candidate"), rows), ""]
    return "\n".join([*text, _METHOD, ""])


def junit_xml(result: GateResult) -> bytes:
    """One test case for the verdict, and one for each tripwire, which is skipped if it is flagged or unknown: it warns only."""
    cases = 1 + len(result.tripwires)
    skipped = sum(wire.flagged or wire.unknown is not None for wire in result.tripwires)
    figures = {
        "tests": cases,
        "failures": int(result.verdict == "worse"),
        "errors": int(result.verdict == "no verdict"),
        "skipped": skipped,
        "time": f"{result.seconds:.3f}",
    }
    attributes = {name: str(value) for name, value in figures.items()}
    suites = ET.Element("testsuites", attributes)
    suite = ET.SubElement(suites, "testsuite", {"name": _SUITE, **attributes})
    case = ET.SubElement(
        suite, "testcase", classname=_SUITE, name="the candidate is not worse", time=attributes["time"]
    )
    if result.verdict != "no decline":
        kind = "failure" if result.verdict == "worse" else "error"
        ET.SubElement(case, kind, message=_xml(result.reason), type=result.verdict)
    rows = [f"{name}: {baseline}, {candidate}" for name, baseline, candidate in _sides(result)]
    ET.SubElement(case, "system-out").text = _xml("\n".join([result.reason, *rows, *_lines(result)]))
    for wire in result.tripwires:
        case = ET.SubElement(suite, "testcase", classname=f"{_SUITE}.tripwires", name=wire.name)
        values = f"{_value(wire.baseline)} → {_value(wire.candidate)}"
        if wire.flagged or wire.unknown is not None:
            ET.SubElement(
                case, "skipped", message=_xml(f"{_remark(wire)}; {values}" if wire.flagged else _remark(wire))
            )
        else:
            ET.SubElement(case, "system-out").text = values
    return bytes(ET.tostring(suites, encoding="utf-8", xml_declaration=True))


def _sides(result: GateResult) -> list[tuple[str, str, str]]:
    both = result.baseline, result.candidate
    return [
        ("server", _xml(both[0].url), _xml(both[1].url)),
        ("mean reward", _reward(both[0]), _reward(both[1])),
        ("rollouts", str(both[0].rollouts), str(both[1].rollouts)),
        ("failed or timed out", str(both[0].failed), str(both[1].failed)),
        ("left out", _left_out(both[0]), _left_out(both[1])),
    ]


def _lines(result: GateResult) -> list[str]:
    rollouts = f"{result.n} rollout{'' if result.n == 1 else 's'} of each under each server"
    found = [f"tasks used: {result.used} of {result.tasks}, {rollouts}"]
    if result.difference is not None:
        interval = f" [{result.interval[0]:+.3f}, {result.interval[1]:+.3f}]" if result.interval else ""
        found.append(f"mean difference over tasks: {result.difference:+.3f}{interval}")
    found.append(
        f"evidence of a decline: {result.evidence:.3g}; {result.decisive:.3g} decides at level {result.level:g}"
    )
    p = [
        f"{name} p = {p:.2g}"
        for name, p in (("reward", result.p_reward), ("finished", result.p_finished))
        if p is not None
    ]
    if p:
        found.append(f"all tasks: {', '.join(p)}")
    if result.detectable is not None:
        found.append(
            f"about 4 of 5 gates like this find a mean fall of {result.detectable:.3f}, if it is of rollouts that get the least reward"
        )
    return found


def _reward(side: GateSide) -> str:
    interval = f" [{side.interval[0]:.3f}, {side.interval[1]:.3f}]" if side.interval else ""
    return "none" if side.mean is None else f"{side.mean:.3f}{interval}"


def _left_out(side: GateSide) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(side.left_out.items())) or "0"


def _value(figure: float | None) -> str:
    return "unknown" if figure is None else f"{figure:.3g}"


def _remark(wire: Tripwire) -> str:
    if wire.unknown is not None:
        return wire.unknown
    return f"differs beyond noise (p = {wire.p:.2g})" if wire.flagged else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _code(text: str) -> str:
    """The text in a code span of a table's cell."""
    plain = " ".join(_xml(text).replace("`", "'").split())
    return "`" + plain.replace("|", "\\|") + "`" if plain else ""


def _plain(text: str) -> str:
    """The text without anything that Markdown or a code host would read."""
    return re.sub(r"([\\`*_{}\[\]<>|#~@!])", r"\\\1", " ".join(_xml(text).split()))


def _xml(text: str) -> str:
    """The text without characters that XML and UTF-8 do not have, or that a terminal obeys."""
    return _NOT_XML.sub("\ufffd", text)

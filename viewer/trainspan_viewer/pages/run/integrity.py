"""The integrity panel of a run: every check by round, each cell a link to its evidence, and the checks that do not hold."""

from typing import Final

from trainspan_viewer.html.elements import Child, Element, element, isolated, link, table
from trainspan_viewer.html.formats import count
from trainspan_viewer.html.paging import paging
from trainspan_viewer.queries.run import CheckRow, RunModel, Stage

__all__ = ["integrity"]

_MOST_ALARMS: Final = 50


def integrity(model: RunModel) -> list[Child]:
    """The grid of one part of the records, and the newest alarms of the whole run."""
    if not model.checks:
        return [element("p", "Nothing was checked yet.", class_="note")]
    run_id = model.records.run_id
    head: list[Child] = ["check", *(_stage_head(run_id, stage) for stage in model.stages)]
    rows: list[list[Child]] = [
        [check.name, *(_cell(run_id, check, column, stage) for column, stage in enumerate(model.stages))]
        for check in model.checks
    ]
    return [
        element("div", table(head, rows, caption="checks by round; v: validation"), class_="grid"),
        paging(model.params.link, *model.stages_part, "records", "checks_from"),
        *_alarms(model),
    ]


def _alarms(model: RunModel) -> list[Child]:
    alarms = model.records.alarms
    if not alarms:
        return []
    items = [
        element(
            "li",
            link(_evidence(model.records.run_id, index), f"round {round_}: {name}"),
            ": ",
            isolated(detail),
            class_="bad",
        )
        for index, round_, name, detail in reversed(alarms[-_MOST_ALARMS:])
    ]
    more = len(alarms) - len(items)
    return [
        element("p", f"{count(len(alarms))} checks do not hold, newest first:"),
        element("ul", *items),
        element("p", f"{count(more)} older ones are in the grid.", class_="note") if more else None,
    ]


def _evidence(run_id: str, index: int) -> str:
    return f"/runs/{run_id}/records/{index}"


def _stage_head(run_id: str, stage: Stage) -> Element:
    short = str(stage.round) if stage.kind == "round" else f"{stage.kind[0]}{stage.round}"
    title = f"{stage.kind} {stage.round}" if stage.kind == "round" else f"{stage.kind} after round {stage.round}"
    return link(_evidence(run_id, stage.index), short, title=title)


def _cell(run_id: str, check: CheckRow, column: int, stage: Stage) -> Child:
    holds = check.holds[column]
    if holds is None:
        return ""
    sign, kind = ("✓", "ok") if holds else ("✗", "bad")
    where = f"{stage.kind} {stage.round}"
    text = f"{check.name}, {where}: {'holds' if holds else 'does not hold'}: {check.details[column]}"
    return link(_evidence(run_id, stage.index), sign, class_=kind, title=text, aria_label=text)

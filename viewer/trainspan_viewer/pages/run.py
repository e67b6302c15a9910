"""One run: curves by round, the integrity panel, the rounds, and the configuration."""

from collections.abc import Callable, Sequence
from typing import Any

from trainspan_schemas.intervals import Estimate
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, isolated, link, table
from trainspan_viewer.html.formats import count, number, seconds
from trainspan_viewer.pages.curves_of_run import run_curves
from trainspan_viewer.queries.run import CheckRow, RunModel, SettingRow, Stage
from trainspan_viewer.queries.runs import Record

__all__ = ["paging", "render_run"]


def render_run(model: RunModel) -> Page:
    """The page is live while the run is in progress."""
    run = model.records
    body: list[Child] = [
        element(
            "div",
            element("div", _facts(model), *run_curves(run), class_="plots"),
            element("h2", "Integrity"),
            *_integrity(model),
            element("h2", "Rounds"),
            *_rounds(model),
            id="live",
        ),
        element("h2", "Configuration"),
        *_configuration(model),
    ]
    live = model.params.link() if run.status == "running" else None
    return Page(f"Run {run.run_id}", body, section="runs", crumbs=[("runs", "/")], live=live)


def _facts(model: RunModel) -> Element:
    run = model.records
    settings = run.run.get("settings", {})
    best, alarms = run.run.get("best"), run.alarms
    last = run.evals()[-1:]
    planned = settings.get("loop", {}).get("rounds")
    rows: list[list[Child]] = [
        ["status", element("span", run.status, class_=f"status {run.status}")],
        ["rounds", f"{model.n_rounds} of {planned}" if planned is not None else model.n_rounds],
        ["agent", settings.get("loop", {}).get("target") or "–"],
        ["model", settings.get("train", {}).get("model") or "–"],
        ["last validation", f"{last[0].estimate} after round {last[0].round}" if last else "–"],
        [
            "best validation",
            f"{Estimate.of_record(best)} after round {best['round']}, {best['checkpoint']}" if best else "–",
        ],
        ["alarms", element("span", f"{len(alarms)}", class_="bad") if alarms else "none"],
    ]
    if ended := run.run.get("ended"):
        rows.append(["ended because", str(ended)])
    return table(["", ""], rows, text=frozenset({0, 1}), caption="the run")


def _integrity(model: RunModel) -> list[Child]:
    if not model.checks:
        return [element("p", "Nothing was checked yet.", class_="note")]
    run_id = model.records.run_id
    head: list[Child] = ["check", *(_stage_head(run_id, stage) for stage in model.stages)]
    rows: list[list[Child]] = [
        [check.name, *(_cell(run_id, check, place, stage) for place, stage in enumerate(model.stages))]
        for check in model.checks
    ]
    older = model.n_stages - len(model.stages)
    alarms = model.records.alarms
    return [
        element("div", table(head, rows, caption="checks by round; v: validation"), class_="grid"),
        element("p", f"{older} older records are not shown.", class_="note") if older else None,
        element(
            "ul",
            *(
                element("li", f"round {round_}: {name}: ", isolated(detail), class_="bad")
                for round_, name, detail in alarms[-20:]
            ),
        )
        if alarms
        else None,
    ]


def _stage_head(run_id: str, stage: Stage) -> Element:
    short = str(stage.round) if stage.kind == "round" else f"{stage.kind[0]}{stage.round}"
    title = f"{stage.kind} {stage.round}" if stage.kind == "round" else f"{stage.kind} after round {stage.round}"
    return link(f"/runs/{run_id}/records/{stage.place}", short, title=title)


def _cell(run_id: str, check: CheckRow, place: int, stage: Stage) -> Child:
    holds = check.holds[place]
    if holds is None:
        return ""
    sign, kind = ("✓", "ok") if holds else ("✗", "bad")
    where = f"{stage.kind} {stage.round}"
    said = f"{check.name}, {where}: {'holds' if holds else 'does not hold'}: {check.details[place]}"
    return link(f"/runs/{run_id}/records/{stage.place}", sign, class_=kind, title=said, aria_label=said)


def _rounds(model: RunModel) -> list[Child]:
    head = (
        "round",
        "version",
        "rollouts",
        "failed",
        "reward",
        "calls",
        "trained",
        "dropped",
        "mean |Δlogp|",
        "ok",
        "time",
    )
    rows = [_round_row(model, record) for record in model.rounds]
    if not rows:
        return [element("p", "No round is finished yet.", class_="note")]
    return [
        table(head, rows, text=frozenset({7}), caption="rounds, newest first"),
        paging(model.params.link, model.start, model.page_size, model.n_rounds, "rounds"),
    ]


def _round_row(model: RunModel, record: Record) -> list[Child]:
    rollout, train, data = record["rollout"], record["train"], record["dataset"]
    status = rollout.get("status") or {}
    name = model.datasets.get(record["round"])
    dropped = ", ".join(f"{reason} {calls}" for reason, calls in sorted((data.get("dropped") or {}).items()))
    holds = all(check["ok"] for check in record["checks"])
    return [
        link(f"/datasets/{name}", record["round"]) if name else record["round"],
        "skipped" if record.get("skipped") else record["policy_version"],
        count(rollout.get("total")),
        sum(value for key, value in status.items() if key != "ok"),
        number(rollout.get("mean_reward")),
        count(data.get("calls_seen")),
        count(data.get("calls_kept")),
        str(record["skipped"]) if record.get("skipped") else dropped or "–",
        number(train.get("logp_diff_mean"), 2),
        element("span", "✓" if holds else "✗", class_="ok" if holds else "bad"),
        seconds(record["seconds"].get("total")),
    ]


def paging(address: Callable[..., str], start: int, size: int, total: int, what: str) -> Element | None:
    """Links to the neighboring parts of a long list; None if it is on one page."""
    if total <= size and not start:
        return None
    last = min(start + size, total)
    return element(
        "p",
        link(address(**{"from": max(0, start - size) or None}), "← earlier in the list", rel="prev") if start else None,
        element("span", f"{start + 1} to {last} of {count(total)} {what}"),
        link(address(**{"from": start + size}), "further →", rel="next") if last < total else None,
        class_="pages",
    )


def _configuration(model: RunModel) -> list[Child]:
    changed = [row for row in model.settings if not row.is_default]
    run_id = model.records.run_id
    choose = element(
        "form",
        element("input", type="hidden", name="run", value=run_id),
        element(
            "label",
            "another run",
            element("select", *(element("option", other, value=other) for other in model.others), name="run"),
        ),
        element("button", "show the difference", type="submit"),
        action="/compare",
        method="get",
        class_="filters",
    )
    every = element(
        "details",
        element("summary", f"all {len(model.settings)} settings"),
        _setting_table(model.settings, "all settings"),
    )
    return [
        _setting_table(changed, "settings other than the defaults")
        if changed
        else element("p", "All settings are the defaults."),
        choose if model.others else None,
        every,
    ]


def _setting_table(rows: Sequence[SettingRow], caption: str) -> Element:
    cells: list[list[Child]] = [[f"[{row.section}]", row.name, _plain(row.value), _plain(row.default)] for row in rows]
    return table(["section", "setting", "value", "default"], cells, text=frozenset({0, 1, 2, 3}), caption=caption)


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)

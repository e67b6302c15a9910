"""One run: curves by round, evaluations, the integrity panel, the rounds, and the configuration."""

from collections.abc import Sequence
from typing import Any, Final

from trainspan_schemas.artifacts.run_files import record_of, versions
from trainspan_schemas.artifacts.run_records import RoundRecord
from trainspan_schemas.intervals import RewardEstimate, measured
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, link, table
from trainspan_viewer.html.formats import count, number, seconds
from trainspan_viewer.html.paging import paging
from trainspan_viewer.pages.run.curves import run_curves
from trainspan_viewer.pages.run.integrity import integrity
from trainspan_viewer.queries.addresses import dataset_address
from trainspan_viewer.queries.run import RunModel, SettingRow

__all__ = ["render_run", "sections"]

_MOST_EVALUATIONS: Final = 100


def render_run(model: RunModel) -> Page:
    """The page is live while the run is in progress."""
    run = model.records
    live = model.params.link() if run.status == "running" else None
    return Page(f"Run {run.run_id}", sections(model), section="runs", crumbs=[("runs", "/")], live=live)


def sections(model: RunModel) -> list[Child]:
    """Everything about the run."""
    return [
        element(
            "div",
            _headline(model),
            element("div", _facts(model), *run_curves(model.records), class_="plots"),
            element("h2", "Evaluations"),
            *_evaluations(model),
            element("h2", "Integrity"),
            *integrity(model),
            element("h2", "Rounds"),
            *_rounds(model),
            id="live",
        ),
        element("h2", "Configuration"),
        *_configuration(model),
    ]


def _headline(model: RunModel) -> Element:
    """What has become better by how much: between the first validation and the last one."""
    validations = [validation for validation in model.records.evals() if validation.estimate.stands]
    if len(validations) < 2:
        text = "Nothing can be said yet about what has become better: that takes two validations on held-out tasks."
        return element("p", text, class_="lead note")
    first, last = validations[0], validations[-1]
    gain = last.estimate.mean - first.estimate.mean
    what = measured(validation.estimate for validation in validations).capitalize()
    moved = "is unchanged" if not gain else f"{'rose' if gain > 0 else 'fell'} by {abs(gain):.3f}"
    body = f"{what} on held-out tasks {moved}, from {first.estimate} after round {first.round} to {last.estimate} after round {last.round}"
    before, after = first.estimate.interval, last.estimate.interval
    overlap = before is not None and after is not None and before[0] <= after[1] and after[0] <= before[1]
    return element("p", f"{body}{'; the 95 % intervals overlap' if overlap and gain else ''}.", class_="lead")


def _facts(model: RunModel) -> Element:
    run = model.records
    settings = run.run.get("settings", {})
    best, alarms = run.run.get("best"), run.alarms
    last = run.evals()[-1:]
    planned = settings.get("loop", {}).get("rounds")
    rows: list[list[Child]] = [
        ["status", element("span", run.status, class_=f"status {run.status}")],
        ["rounds", f"{model.part.total} of {planned}" if planned is not None else model.part.total],
        ["agent", settings.get("loop", {}).get("target") or "–"],
        ["model", settings.get("train", {}).get("model") or "–"],
        ["last validation", f"{last[0].estimate} after round {last[0].round}" if last else "–"],
        [
            "best validation",
            f"{RewardEstimate.of_record(best)} after round {best['round']}, {best['checkpoint']}" if best else "–",
        ],
        ["alarms", element("span", f"{len(alarms)}", class_="bad") if alarms else "none"],
    ]
    if model.training is not None:
        rows.insert(2, ["training", f"round {model.training.round}: {model.training}"])
    if skipped := sum(1 for record in run.rounds if record.get("skipped")):
        rows.append(["skipped rounds", f"{skipped} of {len(run.rounds)}"])
    if refused := sum(1 for record in run.rounds if record.get("refused")):
        rows.append(["refused versions", element("span", f"{refused} of {len(run.rounds)}", class_="bad")])
    if ended := run.run.get("ended"):
        rows.append(["ended because", str(ended)])
    return table(["", ""], rows, text=frozenset({0, 1}), caption="the run")


def _evaluations(model: RunModel) -> list[Child]:
    """The newest evaluations, each with a link to its checks."""
    run = model.records
    evaluations = [(index, record) for index, record in enumerate(run.records) if record["kind"] == "eval"]
    if not evaluations:
        return [element("p", "No evaluation is finished yet.", class_="note")]
    measure = measured(RewardEstimate.of_record(record) for _, record in evaluations)
    head = ("evaluation", "after round", "version", "n", measure, "95 % interval", "pass@k", "status")
    rows: list[list[Child]] = []
    for index, record in reversed(evaluations[-_MOST_EVALUATIONS:]):
        estimate = RewardEstimate.of_record(record)
        rows.append(
            [
                link(f"/runs/{run.run_id}/records/{index}", str(record["name"])),
                record["round"],
                versions(record),
                count(estimate.n),
                f"{estimate.mean:.3f}" if estimate.n else "–",
                f"{estimate.interval[0]:.3f} to {estimate.interval[1]:.3f}" if estimate.interval else "–",
                ", ".join(f"@{k} {value:.3f}" for k, value in (record.get("pass_at") or {}).items()) or "–",
                ", ".join(f"{name} {n}" for name, n in (record.get("status") or {}).items()),
            ]
        )
    older = len(evaluations) - len(rows)
    return [
        table(head, rows, text=frozenset({0, 5, 6, 7}), caption="evaluations on held-out tasks, newest first"),
        element("p", f"{count(older)} older ones are in the curves.", class_="note") if older else None,
    ]


def _rounds(model: RunModel) -> list[Child]:
    """One row per round, of several policies one for each."""
    several = model.records.policies != (None,)
    head = (
        "round",
        *(("policy",) if several else ()),
        "version",
        "rollouts",
        "failed",
        "reward",
        "calls",
        "trained",
        "dropped",
        *(("KL",) if several else ()),
        "mean |Δlogp|",
        "canary",
        "ok",
        "time",
    )
    rows = [
        _round_row(model, index, record, policy) for index, record in model.rounds for policy in model.records.policies
    ]
    if not rows:
        return [element("p", "No round is finished yet.", class_="note")]
    texts = frozenset({1, 8}) if several else frozenset({7})
    return [
        table(head, rows, text=texts, caption="rounds, newest first"),
        paging(model.params.link, *model.part, "rounds"),
    ]


def _round_row(model: RunModel, index: int, whole: RoundRecord, policy: str | None) -> list[Child]:
    record = record_of(whole, policy)
    rollout, train, data = record["rollout"], record["train"], record["dataset"]
    status = rollout.get("status") or {}
    name = model.datasets.get((record["round"], policy))
    dropped = ", ".join(f"{reason} {calls}" for reason, calls in sorted((data.get("dropped") or {}).items()))
    holds = all(check["ok"] for check in record["checks"])
    whose = f"round {record['round']}" + ("" if policy is None else f", policy {policy}")
    return [
        link(dataset_address(name), record["round"]) if name else record["round"],
        *([] if policy is None else [policy]),
        _version(record),
        count(rollout.get("total")),
        sum(value for key, value in status.items() if key != "ok"),
        number(rollout.get("mean_reward")),
        count(data.get("calls_seen")),
        count(data.get("calls_kept")),
        str(record.get("skipped") or record.get("refused") or dropped or "–"),
        *([] if policy is None else [number(train.get("kl"), 2)]),
        number(train.get("logp_diff_mean"), 2),
        ((train.get("swap") or {}).get("canary") or {}).get("status", "–"),
        link(
            f"/runs/{model.records.run_id}/records/{index}",
            "✓" if holds else "✗",
            class_="ok" if holds else "bad",
            aria_label=f"checks of {whose}: {'all hold' if holds else 'some do not hold'}",
        ),
        seconds(record["seconds"].get("total" if policy is None else "train")),
    ]


def _version(record: RoundRecord) -> Child:
    if record.get("skipped"):
        return "skipped"
    if record.get("refused"):
        return element("span", f"refused, {record['policy_version']}", class_="bad")
    return record["policy_version"]


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

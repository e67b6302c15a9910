"""The evidence of one round or evaluation: every check with its figures, its stored rows, and the log if it failed."""

import json

from trainspan_schemas.artifacts.run_files import versions
from trainspan_schemas.artifacts.run_records import PolicyFigures
from trainspan_schemas.intervals import RewardEstimate
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, link, sql_command, table
from trainspan_viewer.html.formats import count, number, seconds
from trainspan_viewer.queries.addresses import dataset_address
from trainspan_viewer.queries.check import StageEvidence, StageModel

__all__ = ["render_stage"]


def render_stage(model: StageModel) -> Page:
    run = f"/runs/{model.run_id}"
    around = element(
        "p",
        link(f"{run}/records/{model.earlier}", "← earlier", rel="prev") if model.earlier is not None else None,
        link(f"{run}/records/{model.later}", "later →", rel="next") if model.later is not None else None,
        *(link(dataset_address(name), _dataset_text(name)) for name in model.datasets),
        class_="pages",
    )
    body: list[Child] = [around, _facts(model), element("h2", "Checks"), *map(_evidence, model.checks)]
    whole = element("pre", json.dumps(model.record, indent=1, ensure_ascii=False))
    body.append(element("details", element("summary", "the whole record"), whole))
    return Page(model.title, body, section="runs", crumbs=[("runs", "/"), (model.run_id, run)])


def _dataset_text(name: str) -> str:
    parts = name.split(":")
    return f"the dataset of {parts[1]}" if len(parts) > 2 else "its dataset"


def _facts(model: StageModel) -> Element:
    record = model.record
    if record["kind"] == "round":
        rollout, data = record["rollout"], record["dataset"]
        status = ", ".join(f"{name} {n}" for name, n in (rollout.get("status") or {}).items())
        rows: list[list[Child]] = [
            ["policy version after it", versions(record)],
            ["rollouts", f"{count(rollout.get('total'))} ({status or '–'})"],
            ["mean reward", number(rollout.get("mean_reward"))],
            ["calls seen, trained", f"{count(data.get('calls_seen'))}, {count(data.get('calls_kept'))}"],
            ["time", ", ".join(f"{name} {seconds(spent)}" for name, spent in record["seconds"].items())],
        ]
        for name, figures in (record.get("policies") or {}).items():
            rows.append([f"policy {name}", _policy(figures)])
        if record.get("skipped"):
            rows.append(["skipped because", str(record["skipped"])])
        if refused := record.get("refused"):
            rows.append(["refused because", refused])
        if compared := (record.get("trial") or {}).get("reward"):
            shown = f"{number(compared['before'])} before, {number(compared['after'])} after"
            rows.append(
                ["reward of trial tasks", f"{shown} on {count(compared['tasks'])} tasks, p = {number(compared['p'])}"]
            )
    else:
        status = ", ".join(f"{name} {n}" for name, n in record["status"].items())
        rows = [
            ["policy version", versions(record)],
            ["result", str(RewardEstimate.of_record(record))],
            ["tasks", count(record.get("tasks"))],
            ["rollouts", status],
            ["calls", count(record.get("calls"))],
            ["time", seconds(record.get("seconds"))],
        ]
    return table(["", ""], rows, text=frozenset({0, 1}), caption="what happened")


def _policy(figures: PolicyFigures) -> str:
    if figures.get("skipped"):
        return f"skipped: {figures['skipped']}"
    train, data = figures["train"], figures["dataset"]
    return (
        f"version {figures['policy_version']}, {count(data.get('calls_kept'))} of {count(data.get('calls_seen'))} calls trained, "
        f"KL {number(train.get('kl'), 2)}"
    )


def _evidence(check: StageEvidence) -> Element:
    sign, kind = ("✓", "ok") if check.holds else ("✗", "bad")
    links = [part for text, address in check.links for part in (" · ", link(address, text))][1:]
    return element(
        "section",
        element("h3", element("span", sign, class_=kind), f" {check.name}"),
        element("p", check.detail, class_=None if check.holds else "bad"),
        element("p", *links) if links else None,
        sql_command(check.query, "the stored rows") if check.query else None,
        element("details", element("summary", "figures"), element("pre", check.figures)) if check.figures else None,
        element("details", element("summary", "end of the log"), element("pre", check.log), open=True)
        if check.log
        else None,
        class_=f"check {kind}",
    )

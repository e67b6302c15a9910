"""The list of runs: status, validation by round, best, alarms; several can be chosen to be compared."""

from trainspan_viewer.html.charts import sparkline
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, element, link, table
from trainspan_viewer.queries.runs import RunsModel, RunSummary

__all__ = ["render_runs"]


def render_runs(model: RunsModel) -> Page:
    if not model.runs:
        empty = element("p", "No runs yet: `trainspan loop` makes one.", class_="note")
        return Page("Runs", [empty], section="runs", live=model.params.link())
    head = ("", "run", "status", "rounds", "validation", "last [95 %]", "best [95 %]", "alarms", "agent", "model")
    listed = table(
        head, [_row(run) for run in model.runs], text=frozenset({0, 1, 2, 4, 8, 9}), caption="runs, newest first"
    )
    more = model.n_runs - len(model.runs)
    body: list[Child] = [
        element(
            "form",
            element("div", listed, id="live"),
            element("button", "compare the marked runs", type="submit"),
            action="/compare",
            method="get",
        ),
        element("p", f"{more} older runs are not listed.", class_="note") if more else None,
    ]
    return Page("Runs", body, section="runs", live=model.params.link())


def _row(run: RunSummary) -> list[Child]:
    if run.error:
        return ["", run.run_id, element("span", run.error, class_="bad"), *("–",) * 7]
    values = [(validation.round, validation.estimate.mean) for validation in run.validations if validation.estimate.n]
    rounds = f"{run.rounds_done} of {run.rounds}" if run.rounds is not None else str(run.rounds_done)
    return [
        element("input", type="checkbox", name="run", value=run.run_id, aria_label=f"mark {run.run_id}"),
        link(f"/runs/{run.run_id}", run.run_id),
        element("span", run.status, class_=f"status {run.status}"),
        rounds,
        sparkline(values, f"validation of {run.run_id}") if len(values) > 1 else "–",
        str(run.validations[-1].estimate) if run.validations else "–",
        f"{run.best.estimate} after round {run.best.round}" if run.best else "–",
        element("span", run.alarms, class_="bad") if run.alarms else 0,
        run.target,
        run.model,
    ]

"""Several runs: their curves over each other, and the settings in which they differ."""

from trainspan_viewer.html.curves import Curve, Point, chart
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, link, table
from trainspan_viewer.html.formats import plain
from trainspan_viewer.pages.run.curves import sampled_after
from trainspan_viewer.queries.run import CompareModel
from trainspan_viewer.queries.runs import RunRecords

__all__ = ["render_compare"]

_METRICS = {
    "k3": "KL to the sampler (k3, nats per token)",
    "entropy": "entropy (nats)",
    "reward_mean": "mean reward of trained rollouts",
    "grad_norm": "gradient norm",
    "logp_diff_mean": "mean |Δ log-probability|, server and trainer",
}


def render_compare(model: CompareModel) -> Page:
    """Live while one of the runs is in progress."""
    charts: list[Element | None] = [
        chart("held-out tasks (95 %)", [_validation(run) for run in model.runs]),
        chart("mean reward of training rollouts", [_rewards(run) for run in model.runs]),
        *(
            chart(
                caption, [curve for run in model.runs for curve in _metric(run, name)], is_log=name == "logp_diff_mean"
            )
            for name, caption in _METRICS.items()
        ),
    ]
    runs: list[list[Child]] = [
        [
            element("i", class_=f"key c{color}"),
            link(f"/runs/{run.run_id}", run.run_id),
            element("span", run.status, class_=f"status {run.status}"),
            len(run.rounds),
            str(evals[-1].estimate) if (evals := run.evals()) else "–",
            element("span", alarms, class_="bad") if (alarms := len(run.alarms)) else 0,
        ]
        for color, run in enumerate(model.runs)
    ]
    settings: list[list[Child]] = [[key, *(plain(value, 6) for value in values)] for key, values in model.differences]
    head = ["setting", *(run.run_id for run in model.runs)]
    left_out = model.n_chosen - len(model.runs)
    body: list[Child] = [
        element("p", f"{left_out} of the {model.n_chosen} chosen runs are left out.", class_="warn")
        if left_out
        else None,
        element(
            "div",
            table(
                ["", "run", "status", "rounds", "last [95 %]", "alarms"],
                runs,
                text=frozenset({0, 1, 2}),
                caption="the runs",
            ),
            element("div", *(figure for figure in charts if figure is not None), class_="plots"),
            id="live",
        ),
        element("h2", "Different settings"),
        table(head, settings, text=frozenset(range(len(head))), caption="settings that differ")
        if settings
        else element("p", "All settings are equal.", class_="note"),
    ]
    live = model.params.link() if any(run.status == "running" for run in model.runs) else None
    title = f"{len(model.runs)} runs" if len(model.runs) > 1 else f"Run {model.runs[0].run_id}"
    return Page(title, body, section="runs", crumbs=[("runs", "/")], live=live)


def _validation(run: RunRecords) -> Curve:
    points = []
    for evaluation in run.evals():
        low, high = evaluation.estimate.interval or (None, None)
        if evaluation.estimate.n:
            points.append(Point(evaluation.round, evaluation.estimate.mean, low, high))
    return Curve(run.run_id, points)


def _rewards(run: RunRecords) -> Curve:
    points = [(sampled_after(record), record["rollout"].get("mean_reward")) for record in run.rounds]
    return Curve(run.run_id, [Point(x, y) for x, y in points if y is not None])


def _metric(run: RunRecords, name: str) -> list[Curve]:
    """One curve, or one for each of several policies."""
    return [
        Curve(
            run.run_id if policy is None else f"{run.run_id} {policy}",
            [Point(x, line[name]) for x, line in sorted(metrics.items()) if line.get(name) is not None],
        )
        for policy, metrics in run.metrics.items()
    ]

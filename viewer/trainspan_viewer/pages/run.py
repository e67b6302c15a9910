"""One run: curves by round, the integrity panel, the rounds, and the configuration."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainspan_schemas.intervals import Estimate, measured
from trainspan_viewer.html.curves import Curve, Point, chart
from trainspan_viewer.html.document import Page
from trainspan_viewer.html.elements import Child, Element, element, link, table
from trainspan_viewer.html.formats import count, number, seconds
from trainspan_viewer.queries.run import CheckRow, RunModel, SettingRow, Stage
from trainspan_viewer.queries.runs import Record, RunRecords

__all__ = ["render_run", "run_curves", "success_chart"]


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


def run_curves(run: RunRecords) -> list[Child]:
    """All charts of a run that have values."""
    rounds, metrics = run.rounds, run.metrics
    charts = [
        success_chart(run),
        _metric_chart("KL (nats per token)", metrics, {"k3": "k3 to the sampler", "kl": "after the last step"}),
        _metric_chart("entropy (nats)", metrics, {"entropy": "entropy"}),
        chart(
            "mean |Δ log-probability|, server and trainer",
            [Curve("mean", _points(rounds, lambda one: (one["train"].get("agreement") or {}).get("mean")), 2)],
            limit=next((limit for one in reversed(rounds) if (limit := _limit(one)) is not None), None),
            is_log=True,
        ),
        _metric_chart("clipped share of tokens", metrics, {"clip_low": "low", "clip_high": "high"}),
        _metric_chart("gradient norm", metrics, {"grad_norm": "mean", "grad_norm_max": "largest step"}),
        chart(
            "seconds of a round",
            [
                Curve(name, _points(rounds, lambda one, key=key: one["seconds"].get(key)), color)  # type: ignore[misc]
                for key, name, color in (
                    ("rollouts", "rollouts", 7),
                    ("dataset", "dataset", 1),
                    ("train", "training", 0),
                )
            ],
        ),
        chart(
            "tokens sampled per second",
            [Curve("tokens", _points(rounds, lambda one: _rate(one["rollout"])), 5)],
        ),
    ]
    return [one for one in charts if one is not None]


def success_chart(run: RunRecords) -> Element | None:
    """Held-out success with 95 % intervals, and the mean reward of training rollouts at the policy that made them."""
    shown = [
        Curve(label, [_estimated(one.round, one.estimate) for one in found if one.estimate.n], color)
        for name, label, color in (("validation", "held-out tasks (95 %)", 0), ("probe", "hard probe (95 %)", 1))
        if (found := run.evals(name))
    ]
    training = _points(run.rounds, lambda one: one["rollout"].get("mean_reward"), shift=-1)
    measure = measured(one.estimate for one in (*run.evals(), *run.evals("probe")))
    within = measure == "success" and all(0 <= point.y <= 1 for point in training)
    return chart(
        f"{measure} after each round",
        [*shown, Curve("training rollouts", training, 7)],
        limits=(0.0, 1.0) if within else None,
    )


def _estimated(round_: int, estimate: Estimate) -> Point:
    low, high = estimate.interval or (None, None)
    return Point(round_, estimate.mean, low, high)


def _points(rounds: Sequence[Record], value: Callable[[Record], float | None], shift: int = 0) -> list[Point]:
    found = [(record["round"] + shift, value(record)) for record in rounds]
    return [Point(x, y) for x, y in found if y is not None]


def _metric_chart(caption: str, metrics: Mapping[int, Record], names: Mapping[str, str]) -> Element | None:
    curves = [
        Curve(label, [Point(x, line[name]) for x, line in sorted(metrics.items()) if line.get(name) is not None])
        for name, label in names.items()
    ]
    return chart(caption, curves)


def _limit(record: Record) -> float | None:
    limit = (record["train"].get("agreement") or {}).get("limit")
    return None if limit is None else float(limit)


def _rate(rollout: Mapping[str, Any]) -> float | None:
    sampled, spent = rollout.get("sampled_tokens"), rollout.get("sampling_seconds")
    return sampled / spent if sampled is not None and spent else None


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
                element("li", f"round {round_}: {name}: {detail}", class_="bad")
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

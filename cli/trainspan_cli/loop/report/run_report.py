"""The report of a run: `report.html`, its plots, and `rounds.csv`, from its records and the trainer's metrics."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainspan_cli.loop.checks.skipping import skipped_rounds
from trainspan_cli.loop.report.curves import draw_curves, draw_training
from trainspan_cli.loop.report.page import write_page
from trainspan_cli.loop.state.run_folder import RunFolder
from trainspan_schemas.intervals import Estimate, measured
from trainspan_viewer.html.elements import Element, element, picture, table

__all__ = ["write_report"]

Record = Mapping[str, Any]


def write_report(run: RunFolder, title: str, verdicts: Sequence[tuple[str, bool, str]]) -> Path:
    """Writes `curves.png`, `training.png`, `rounds.csv` and `report.html` into the run's folder; returns the page's path."""
    records, metrics = run.records(), run.metrics()
    curves, training = run.path / "curves.png", run.path / "training.png"
    draw_curves(records, curves, title)
    draw_training(records, metrics, training)
    _write_csv(run.path / "rounds.csv", records, metrics)
    best = run.read("run.json").get("best")
    evals = [record for record in records if record["kind"] == "eval"]
    measure = measured(Estimate.of_record(record) for record in evals)
    return write_page(
        run.path / "report.html",
        title,
        picture(curves, f"{measure.capitalize()} by round"),
        *_verdicts(verdicts),
        element("h2", "Evaluations"),
        table(
            ("evaluation", "after round", "policy version", "n", measure, "95 % interval", "pass@k", "status"),
            [_eval_row(record) for record in evals],
        ),
        element("p", f"Best validation: {_best(best)}") if best else None,
        element("h2", "Training"),
        picture(training, "KL, entropy, clipping, staleness, gradient norm and stage times by round"),
        element("h2", "Rounds"),
        table(
            ("round", "version", "rollouts", "reward", "calls", "trained", "dropped", "mean |Δlogp|", "canary", "s"),
            [_round_row(record) for record in records if record["kind"] == "round"],
        ),
        *_skipped(records),
        element("h2", "Integrity"),
        _integrity(records),
    )


def _best(best: Record) -> str:
    return f"after round {best['round']}, {Estimate.of_record(best)}, kept as {best['checkpoint']}"


def _skipped(records: Sequence[Record]) -> list[Element]:
    found = skipped_rounds(records)
    if not found:
        return []
    rounds = sum(record["kind"] == "round" for record in records)
    rows = [[str(record["round"]), str(record["skipped"])] for record in found]
    return [
        element("p", f"Skipped rounds: {len(found)} of {rounds}"),
        table(("round", "why it was skipped"), rows, text=frozenset({0, 1})),
    ]


def _verdicts(verdicts: Sequence[tuple[str, bool, str]]) -> list[Element]:
    if not verdicts:
        return []
    items = [
        element("li", f"{'✓' if ok else '✗'} {name}: {detail}", class_="ok" if ok else "bad")
        for name, ok, detail in verdicts
    ]
    return [element("h2", "Verdict"), element("ul", *items)]


def _eval_row(record: Record) -> list[str]:
    estimate = Estimate.of_record(record)
    mean = f"{estimate.mean:.3f}" if estimate.n else "–"
    interval = f"{estimate.interval[0]:.3f} to {estimate.interval[1]:.3f}" if estimate.interval else "–"
    status = ", ".join(f"{name} {count}" for name, count in record["status"].items())
    name, round_, version = str(record["name"]), str(record["round"]), str(record["policy_version"])
    passes = ", ".join(f"@{k} {value:.3f}" for k, value in (record.get("pass_at") or {}).items()) or "–"
    return [name, round_, version, str(estimate.n), mean, interval, passes, status]


def _round_row(record: Record) -> list[str]:
    train, data = record["train"], record["dataset"]
    reward = record["rollout"].get("mean_reward")
    canary = ((train.get("swap") or {}).get("canary") or {}).get("status", "skipped" if record.get("skipped") else "–")
    dropped = ", ".join(f"{name} {count}" for name, count in sorted((data.get("dropped") or {}).items()))
    difference = train.get("logp_diff_mean")
    return [
        str(record["round"]),
        str(record["policy_version"]),
        str(record["rollout"].get("total", "–")),
        "–" if reward is None else f"{reward:.3f}",
        str(data.get("calls_seen")),
        str(data.get("calls_kept")),
        dropped or "–",
        "–" if difference is None else f"{difference:.1e}",
        str(canary),
        f"{record['seconds']['total']:.1f}",
    ]


def _integrity(records: Sequence[Record]) -> Element:
    names: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for check in record["checks"]:
            names.setdefault(check["name"], []).append({**check, "round": record["round"]})
    rows = []
    for name, checks in names.items():
        failed = [check for check in checks if not check["ok"]]
        shown = failed[0] if failed else checks[-1]
        rows.append(
            [name, f"{len(checks) - len(failed)} of {len(checks)}", f"round {shown['round']}: {shown['detail']}"]
        )
    return table(("check", "held", "example"), rows, text=frozenset({0, 2}))


def _write_csv(path: Path, records: Sequence[Record], metrics: Mapping[int, Record]) -> None:
    """Writes one line per round: the loop's figures, the validation after it, and every number of the trainer."""
    validations = {
        record["round"]: Estimate.of_record(record)
        for record in records
        if record["kind"] == "eval" and record["name"] == "validation"
    }
    lines = []
    for record in records:
        if record["kind"] != "round":
            continue
        number = record["round"]
        trainer = {
            f"train_{name}": value
            for name, value in metrics.get(number, {}).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("round", "version")
        }
        validation = validations.get(number)
        lines.append(
            {
                "round": number,
                "policy_version": record["policy_version"],
                "skipped": record.get("skipped"),
                "rollouts": record["rollout"].get("total"),
                "reward_mean": record["rollout"].get("mean_reward"),
                "sampled_tokens": record["rollout"].get("sampled_tokens"),
                "validation": validation.mean if validation and validation.n else None,
                "validation_n": validation.n if validation else None,
                "calls_seen": record["dataset"].get("calls_seen"),
                "calls_kept": record["dataset"].get("calls_kept"),
                **{f"seconds_{stage}": seconds for stage, seconds in record["seconds"].items()},
                **trainer,
            }
        )
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)

"""`report.html` and `curves.png` of a run, from its records alone."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .intervals import Rate

__all__ = ["draw_curves", "write_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right }
th:first-child, td:first-child, .text td:last-child, .text th:last-child { text-align: left }
.ok { color: #1a7f37 } .bad { color: #cf222e; font-weight: 600 } .big { font-size: 1.2rem }
"""


def draw_curves(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Success by round with 95 % Wilson intervals, and the agreement of server and trainer below it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rounds = [record for record in records if record["kind"] == "round"]
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    success, difference = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    shown = [record for record in rounds if record["rollout"].get("mean_reward") is not None]
    # A round's rollouts come from the policy before its update, so they stand where that policy's validation stands.
    success.plot(
        [record["round"] - 1 for record in shown],
        [record["rollout"]["mean_reward"] for record in shown],
        ".-",
        color="#8c959f",
        label="training rollouts (mean reward)",
    )
    for name, colour, label in (("validation", "#0969da", "held-out tasks"), ("probe", "#bc4c00", "hard probe")):
        evals = sorted((r for r in records if r["kind"] == "eval" and r["name"] == name), key=lambda r: int(r["round"]))
        if not evals:
            continue
        rates = [Rate(record["successes"], record["n"]) for record in evals]
        values = [rate.value for rate in rates]
        low = [rate.value - rate.interval[0] for rate in rates]
        high = [rate.interval[1] - rate.value for rate in rates]
        success.errorbar(
            [record["round"] for record in evals],
            values,
            yerr=[low, high],
            fmt="o-",
            capsize=3,
            color=colour,
            label=f"{label} (95 % Wilson)",
        )
    success.set_ylabel("success")
    success.set_ylim(0, 1)
    success.grid(alpha=0.3)
    success.legend(loc="upper left", fontsize=8)
    success.set_title(title, fontsize=10)
    agreed = [record for record in rounds if record["train"].get("logp_diff_max")]
    difference.semilogy(
        [record["round"] - 1 for record in agreed],
        [record["train"]["logp_diff_max"] for record in agreed],
        ".-",
        color="#1a7f37",
    )
    difference.axhline(1e-3, color="#cf222e", linewidth=0.8, linestyle="--")
    difference.set_ylabel("max |Δlogp|\nserver − trainer", fontsize=8)
    difference.set_xlabel("updates of the policy")
    difference.xaxis.set_major_locator(MaxNLocator(integer=True))
    difference.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def write_report(
    folder: Path, title: str, records: Sequence[dict[str, Any]], verdicts: Sequence[tuple[str, bool, str]]
) -> Path:
    """Writes `curves.png` and a self-contained `report.html` into `folder`; returns the page's path."""
    picture = folder / "curves.png"
    draw_curves(records, picture, title)
    image = base64.b64encode(picture.read_bytes()).decode()
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
        f"<p><img alt='Success by round' src='data:image/png;base64,{image}'></p>",
        _verdicts(verdicts),
        "<h2>Evaluations</h2>",
        _table(
            ("evaluation", "after round", "policy version", "n", "success", "95 % Wilson interval", "status"),
            [_eval_row(record) for record in records if record["kind"] == "eval"],
        ),
        "<h2>Rounds</h2>",
        _table(
            ("round", "version", "rollouts", "reward", "calls", "trained", "dropped", "max |Δlogp|", "canary", "s"),
            [_round_row(record) for record in records if record["kind"] == "round"],
        ),
        "<h2>Integrity</h2>",
        _integrity(records),
        "</html>",
    ]
    page = folder / "report.html"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _verdicts(verdicts: Sequence[tuple[str, bool, str]]) -> str:
    if not verdicts:
        return ""
    items = "".join(
        f"<li class='{'ok' if ok else 'bad'}'>{'✓' if ok else '✗'} {escape(name)}: {escape(detail)}</li>"
        for name, ok, detail in verdicts
    )
    return f"<h2>Verdict</h2><ul>{items}</ul>"


def _eval_row(record: dict[str, Any]) -> list[str]:
    rate = Rate(record["successes"], record["n"])
    low, high = rate.interval
    status = ", ".join(f"{name} {count}" for name, count in record["status"].items())
    name, round_, version = str(record["name"]), str(record["round"]), str(record["policy_version"])
    return [name, round_, version, str(record["n"]), f"{rate.value:.3f}", f"{low:.3f} to {high:.3f}", status]


def _round_row(record: dict[str, Any]) -> list[str]:
    train, data = record["train"], record["dataset"]
    reward = record["rollout"].get("mean_reward")
    canary = ((train.get("swap") or {}).get("canary") or {}).get("status", train.get("skipped") or "–")
    dropped = ", ".join(f"{name} {count}" for name, count in sorted((data.get("dropped") or {}).items()))
    difference = train.get("logp_diff_max")
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


def _integrity(records: Sequence[dict[str, Any]]) -> str:
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
    return _table(("check", "held", "example"), rows, kind="text")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "figures") -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table class='{kind}'><tr>{header}</tr>{body}</table>"

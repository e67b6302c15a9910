"""A comparison of runs as a table, as plain values and as a page."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from trainspan_loop.report.comparison import Series, measured_in
from trainspan_loop.report.curves import draw_comparison
from trainspan_viewer.html.document import Page, standalone
from trainspan_viewer.html.elements import Child, element, picture, table

__all__ = ["comparison_record", "comparison_table", "write_comparison"]

HEAD = ("settings", "seed", "run", "rounds", "start", "end", "best", "gain [95 % over seeds]", "alarms", "min")


def comparison_record(series: Sequence[Series]) -> list[dict[str, object]]:
    """One object per series: its runs, its validation bands and its gain."""
    return [
        {
            "settings": group.label,
            "gain": group.gain()[0],
            "gain_interval": group.gain()[1],
            "validation": [asdict(band) for band in group.validation()],
            "runs": [asdict(run) for run in group.outcomes()],
        }
        for group in series
    ]


def comparison_table(series: Sequence[Series]) -> Table:
    """The table for the terminal."""
    shown = Table(box=None)
    for name in HEAD:
        shown.add_column(name, justify="left" if name in ("settings", "run") else "right", overflow="fold")
    for row in _rows(series):
        shown.add_row(*row)
    return shown


def write_comparison(path: Path, series: Sequence[Series]) -> Path:
    """Writes the page, and the picture next to it as PNG; returns the page's path."""
    curves = path.with_suffix(".png")
    draw_comparison(series, curves)
    body: list[Child] = [
        picture(curves, f"Held-out {measured_in(series)} by round"),
        element("h2", "Runs"),
        table(HEAD, _rows(series)),
    ]
    path.write_text(standalone(Page("trainspan: runs compared", body)), encoding="utf-8")
    return path


def _rows(series: Sequence[Series]) -> list[list[str]]:
    rows = []
    for group in series:
        gain, interval = group.gain()
        whole = f"{gain:+.3f}" + (f" [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else "")
        for number, run in enumerate(group.outcomes()):
            rows.append(
                [
                    group.label if number == 0 else "",
                    str(run.seed),
                    run.run_id,
                    f"{run.rounds}" + ("" if run.status == "finished" else f" ({run.status})"),
                    str(run.start),
                    str(run.end),
                    f"{run.best.mean:.3f} after {run.best_round}",
                    whole if number == 0 else "",
                    str(run.alarms),
                    f"{run.seconds / 60:.1f}",
                ]
            )
    return rows

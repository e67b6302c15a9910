"""A comparison of runs as text, as plain values and as a page."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainspan_loop.report.comparison import Band, ComparedRun, Series, measured_in
from trainspan_viewer.html.curves import Curve, Point, chart
from trainspan_viewer.html.document import Page, standalone
from trainspan_viewer.html.elements import element, table

__all__ = ["comparison_record", "comparison_text", "write_comparison"]

HEAD = ("settings", "seed", "run", "rounds", "start", "end", "best", "gain", "alarms", "min")


def comparison_record(series: Sequence[Series]) -> list[dict[str, object]]:
    """One object per series: its runs, its validation bands and its gain."""
    return [
        {
            "settings": group.label,
            "gain": None if (gain := group.gain()) is None else asdict(gain),
            "validation": [asdict(band) for band in group.validation()],
            "runs": [
                {**asdict(run), **{name: getattr(run, name).record() for name in ("start", "end", "best")}}
                for run in group.outcomes()
            ],
        }
        for group in series
    ]


def comparison_text(series: Sequence[Series]) -> Group:
    """For a terminal of 80 columns: each series with its gain, and its runs, each with the round of its best validation."""
    parts: list[Text | Table] = []
    for one in series:
        runs = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("seed", "run", "rounds", "start", "end", "best", "alarms"):
            runs.add_column(name, justify="left" if name == "run" else "right", overflow="fold", no_wrap=name != "run")
        for run in one.outcomes():
            best = f"{run.best.mean:.3f} ({run.best_round})"
            start = f"{run.start.mean:.3f}"
            runs.add_row(str(run.seed), run.run_id, _rounds(run), start, str(run.end), best, str(run.alarms))
        parts += [Text(f"{one.label}: {_gain(one)}"), runs]
    return Group(*parts)


def write_comparison(path: Path, series: Sequence[Series]) -> Path:
    """Writes the page: held-out success (or reward) by round of each series with its 95 % t-interval over seeds, and its runs."""
    measure = measured_in(series)
    curves = [
        Curve(f"{one.label} ({len(one.counted())} seeds)", [_point(band) for band in one.validation()])
        for one in series
    ]
    drawn = chart(f"held-out {measure}", curves, limits=(0, 1) if measure == "success" else None, size=(860, 408))
    body = [drawn, element("h2", "Runs"), table(HEAD, _rows(series))]
    path.write_text(standalone(Page("trainspan: runs compared", body)), encoding="utf-8")
    return path


def _point(band: Band) -> Point:
    low, high = band.interval or (None, None)
    return Point(band.round, band.mean, low, high)


def _gain(series: Series) -> str:
    """Its mean, its 95 % interval over several seeds, and how many runs are left out of it."""
    if (gain := series.gain()) is None:
        return "no gain yet"
    interval = f" [{gain.interval[0]:+.3f}, {gain.interval[1]:+.3f}]" if gain.interval else ""
    left_out = f", {n} runs left out" if (n := len(series.runs) - gain.n) else ""
    return f"gain {gain.mean:+.3f}{interval} over {gain.n} seed{'s' * (gain.n > 1)}{left_out}"


def _rounds(run: ComparedRun) -> str:
    return f"{run.rounds}" + ("" if run.status == "finished" else f" ({run.status})")


def _rows(series: Sequence[Series]) -> list[list[str]]:
    rows = []
    for group in series:
        for number, run in enumerate(group.outcomes()):
            rows.append(
                [
                    group.label if number == 0 else "",
                    str(run.seed),
                    run.run_id,
                    _rounds(run),
                    str(run.start),
                    str(run.end),
                    f"{run.best.mean:.3f} after {run.best_round}",
                    _gain(group) if number == 0 else "",
                    str(run.alarms),
                    f"{run.seconds / 60:.1f}",
                ]
            )
    return rows

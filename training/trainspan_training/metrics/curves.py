"""Plots a run: `curves.png` next to `metrics.jsonl`."""

import os
from pathlib import Path

from trainspan_training.metrics.round_record import read

__all__ = ["CURVES_FILE", "draw"]

CURVES_FILE = "curves.png"

_PANELS = (
    ("reward", ("reward_mean",), False),
    ("KL (k3) to the sampling policy", ("kl", "k3"), True),
    ("|Δ log p| server − trainer, first step", ("logp_diff_max", "logp_diff_mean"), True),
    ("clipped share", ("clip_low", "clip_high"), False),
    ("loss", ("loss",), False),
    ("gradient norm", ("grad_norm",), False),
)


def draw(checkpoints: Path) -> None:
    """Draws all recorded rounds. Imports matplotlib without pyplot and its global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read(checkpoints)
    if not records:
        return
    figure = Figure(figsize=(11, 6))
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.08, top=0.95, wspace=0.28, hspace=0.32)
    FigureCanvasAgg(figure)
    for axes, (title, names, logarithmic) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        for name in names:
            points = [(record["round"], record[name]) for record in records if record.get(name) is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
            if logarithmic and any(y > 0 for _, y in points):
                axes.set_yscale("log", nonpositive="mask")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("round", fontsize=8)
        axes.tick_params(labelsize=8)
        if len(names) > 1:
            axes.legend(fontsize=7)
    temporary = checkpoints / f".{CURVES_FILE}.{os.getpid()}.png"
    figure.savefig(temporary, dpi=90)
    temporary.replace(checkpoints / CURVES_FILE)

"""Plots of one run and of several runs, from their records alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainspan_cli.loop.report.comparison import Band, Series, measured_in
from trainspan_schemas.intervals import Estimate, measured

__all__ = ["draw_comparison", "draw_curves", "draw_training"]

Record = Mapping[str, Any]

GRAY, BLUE, ORANGE, GREEN, RED, PURPLE = "#8c959f", "#0969da", "#bc4c00", "#1a7f37", "#cf222e", "#8250df"


def draw_curves(records: Sequence[Record], path: Path, title: str) -> None:
    """Plots success (or reward) by round with 95 % intervals, and below it the agreement of server and trainer."""
    from matplotlib.figure import Figure

    rounds = [record for record in records if record["kind"] == "round"]
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    reward, difference = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    shown = [record for record in rounds if record["rollout"].get("mean_reward") is not None]
    # A round's rollouts come from the policy before its update, so they are plotted at that policy's validation.
    reward.plot(
        [record["round"] - 1 for record in shown],
        [record["rollout"]["mean_reward"] for record in shown],
        ".-",
        color=GRAY,
        label="training rollouts (mean reward)",
    )
    held_out: list[Estimate] = []
    for name, color, label in (("validation", BLUE, "held-out tasks"), ("probe", ORANGE, "hard probe")):
        evals = sorted((r for r in records if r["kind"] == "eval" and r["name"] == name), key=lambda r: int(r["round"]))
        if not evals:
            continue
        estimates = [Estimate.of_record(record) for record in evals]
        reward.errorbar(
            [record["round"] for record in evals],
            [estimate.mean for estimate in estimates],
            yerr=_error_bars(estimates),
            fmt="o-",
            capsize=3,
            color=color,
            label=f"{label} (95 %)",
        )
        held_out += estimates
    measure = measured(held_out)
    reward.set_ylabel(measure)
    if measure == "success" and all(0 <= record["rollout"]["mean_reward"] <= 1 for record in shown):
        reward.set_ylim(0, 1)
    reward.legend(loc="upper left", fontsize=8)
    reward.set_title(title, fontsize=10)
    agreed = [record for record in rounds if record["train"].get("agreement")]
    difference.semilogy(
        [record["round"] - 1 for record in agreed],
        [record["train"]["agreement"]["mean"] or math.nan for record in agreed],
        ".-",
        color=GREEN,
    )
    for limit in {record["train"]["agreement"]["limit"] for record in agreed}:
        difference.axhline(limit, color=RED, linewidth=0.8, linestyle="--")
    difference.set_ylabel("mean |Δlogp|\nserver − trainer", fontsize=8)
    _finish(figure, (reward, difference), path)


def draw_training(records: Sequence[Record], metrics: Mapping[int, Record], path: Path) -> None:
    """Plots KL, entropy, clipped share, staleness and stage times by round; `metrics` are the trainer's lines by round."""
    from matplotlib.figure import Figure

    rounds = [record for record in records if record["kind"] == "round"]
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    axes = figure.subplots(3, 2, sharex=True)
    flat = [axis for row in axes for axis in row]
    kl, entropy, clip, staleness, gradient, stages = flat
    _lines(kl, metrics, {"k3": (BLUE, "k3 to the sampler"), "kl": (GREEN, "after the last step")})
    kl.set_ylabel("KL (nats per token)")
    _lines(entropy, metrics, {"entropy": (BLUE, "entropy")})
    entropy.set_ylabel("entropy (nats)")
    _lines(clip, metrics, {"clip_low": (BLUE, "low"), "clip_high": (ORANGE, "high")})
    clip.set_ylabel("clipped share of tokens")
    stale = {number: line["version"] - 1 - line["policy_versions"][0] for number, line in _with_versions(metrics)}
    staleness.plot(list(stale), list(stale.values()), ".-", color=PURPLE, label="oldest call")
    staleness.set_ylabel("staleness (versions)")
    staleness.set_ylim(0, max(1, *stale.values()) * 1.1 if stale else 1)
    _lines(gradient, metrics, {"grad_norm": (BLUE, "gradient norm")})
    gradient.set_ylabel("gradient norm")
    numbers = [record["round"] for record in rounds]
    parts = [[record["seconds"].get(stage, 0.0) for record in rounds] for stage in ("rollouts", "dataset", "train")]
    stages.stackplot(numbers, *parts, labels=["rollouts", "dataset", "training"], colors=[GRAY, ORANGE, BLUE])
    stages.set_ylabel("seconds of a round")
    for axis in flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    _finish(figure, flat, path, label="round")


def draw_comparison(series: Sequence[Series], path: Path) -> None:
    """Plots held-out success (or reward) by round of each series: the mean over its seeds, and for several its 95 % t-interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for number, one in enumerate(series):
        color = f"C{number}"
        bands: list[Band] = one.validation()
        rounds = [band.round for band in bands]
        axis.plot(
            rounds, [band.mean for band in bands], "o-", color=color, label=f"{one.label} ({len(one.runs)} seeds)"
        )
        several = [band for band in bands if band.interval is not None]
        axis.fill_between(
            [band.round for band in several],
            [band.interval[0] for band in several if band.interval],
            [band.interval[1] for band in several if band.interval],
            color=color,
            alpha=0.2,
        )
    measure = measured_in(series)
    axis.set_ylabel(f"held-out {measure}")
    if measure == "success":
        axis.set_ylim(0, 1)
    axis.legend(fontsize=8)
    _finish(figure, (axis,), path)


def _error_bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths below and above the means; 0 if there is no interval."""
    intervals = [estimate.interval or (estimate.mean, estimate.mean) for estimate in estimates]
    means = [estimate.mean for estimate in estimates]
    return [
        [mean - low for mean, (low, _) in zip(means, intervals, strict=True)],
        [high - mean for mean, (_, high) in zip(means, intervals, strict=True)],
    ]


def _lines(axis: Any, metrics: Mapping[int, Record], names: Mapping[str, tuple[str, str]]) -> None:
    for name, (color, label) in names.items():
        known = [(number, line[name]) for number, line in metrics.items() if line.get(name) is not None]
        if known:
            axis.plot([number for number, _ in known], [value for _, value in known], ".-", color=color, label=label)


def _with_versions(metrics: Mapping[int, Record]) -> Iterable[tuple[int, Record]]:
    return ((number, line) for number, line in metrics.items() if line.get("policy_versions") and not line.get("error"))


def _finish(figure: Any, axes: Sequence[Any], path: Path, label: str = "updates of the policy") -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[-2:] if len(axes) > 2 else axes[-1:]:
        axis.set_xlabel(label)
    figure.savefig(path, dpi=110)

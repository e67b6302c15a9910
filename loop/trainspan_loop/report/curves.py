"""Plots of one run and of several runs, from their records alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainspan_loop.report.comparison import Band, Series, measured_in
from trainspan_schemas.artifacts.agreement import applied_limit
from trainspan_schemas.artifacts.run_files import record_of
from trainspan_schemas.artifacts.run_records import RoundRecord, RunRecord, evaluations_in, rounds_in
from trainspan_schemas.intervals import RewardEstimate, measured
from trainspan_viewer.pages.run.curves import sampled_after

__all__ = ["draw_comparison", "draw_curves"]

GRAY, BLUE, ORANGE, GREEN, RED = "#8c959f", "#0969da", "#bc4c00", "#1a7f37", "#cf222e"


def draw_curves(records: Sequence[RunRecord], path: Path, title: str) -> None:
    """Plots success (or reward) by round with 95 % intervals, and below it the agreement of server and trainer."""
    from matplotlib.figure import Figure

    rounds = rounds_in(records)
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    reward, difference = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    rewarded = [(record, record["rollout"].get("mean_reward")) for record in rounds]
    shown = [(sampled_after(record), mean) for record, mean in rewarded if mean is not None]
    # A round's rollouts come from the policy before its update, or from earlier ones if they ran ahead of training: they are
    # plotted at that policy's validation.
    reward.plot(
        [after for after, _ in shown],
        [mean for _, mean in shown],
        ".-",
        color=GRAY,
        label="training rollouts (mean reward)",
    )
    held_out: list[RewardEstimate] = []
    validations, probes = evaluations_in(records, "validation"), evaluations_in(records, "probe")
    for evaluations, color, label in ((validations, BLUE, "held-out tasks"), (probes, ORANGE, "hard probe")):
        evals = sorted(evaluations, key=lambda record: record["round"])
        if not evals:
            continue
        estimates = [RewardEstimate.of_record(record) for record in evals]
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
    if measure == "success" and all(0 <= mean <= 1 for _, mean in shown):
        reward.set_ylim(0, 1)
    reward.legend(loc="upper left", fontsize=8)
    reward.set_title(title, fontsize=10)
    policies = list(dict.fromkeys(policy for record in rounds for policy in record.get("policies") or (None,)))
    for number, policy in enumerate(policies):
        _draw_agreement(difference, [record_of(record, policy) for record in rounds], policy, number)
    difference.set_ylabel("mean |Δlogp|\nserver − trainer", fontsize=8)
    _finish(figure, (reward, difference), path)


def _draw_agreement(axis: Any, rounds: Sequence[RoundRecord], policy: str | None, number: int) -> None:
    """The mean difference of one policy by round, and its limit."""
    agreed = [record for record in rounds if record["train"].get("agreement")]
    updates = [record["round"] - 1 for record in agreed]
    color = GREEN if policy is None else f"C{number}"
    means = [record["train"]["agreement"]["mean"] or math.nan for record in agreed]
    axis.semilogy(updates, means, ".-", color=color, label=policy)
    limits = [applied_limit(record["train"]["agreement"]) or math.nan for record in agreed]
    axis.semilogy(updates, limits, "_--", color=RED, linewidth=0.8)
    if policy is not None:
        axis.legend(loc="upper left", fontsize=7)


def draw_comparison(series: Sequence[Series], path: Path) -> None:
    """Plots held-out success (or reward) by round of each series: the mean over its seeds, and for several its 95 % t-interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for number, group in enumerate(series):
        color = f"C{number}"
        bands: list[Band] = group.validation()
        rounds = [band.round for band in bands]
        axis.plot(
            rounds, [band.mean for band in bands], "o-", color=color, label=f"{group.label} ({len(group.runs)} seeds)"
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


def _error_bars(estimates: Sequence[RewardEstimate]) -> list[list[float]]:
    """Lengths below and above the means; 0 if there is no interval."""
    intervals = [estimate.interval or (estimate.mean, estimate.mean) for estimate in estimates]
    means = [estimate.mean for estimate in estimates]
    return [
        [mean - low for mean, (low, _) in zip(means, intervals, strict=True)],
        [high - mean for mean, (_, high) in zip(means, intervals, strict=True)],
    ]


def _finish(figure: Any, axes: Sequence[Any], path: Path) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("updates of the policy")
    figure.savefig(path, dpi=110)

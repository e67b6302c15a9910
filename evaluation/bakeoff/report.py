"""Results of the bake-off on disk, as tables and as pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from evaluation.plans import RESULTS
from evaluation.provenance import since
from trainspan_schemas.intervals import t_interval

__all__ = ["FOLDER", "draw_chain", "store", "table_of_agent", "tables_of_chain"]

FOLDER: Final = RESULTS / "bakeoff"
DRAWN: Final = ("identical", "gigpo", "per_agent, air", "vine m 4", "vine m 4, random:.1", "exact")
"""Estimators whose learning curves are drawn; tables have all."""


def store(name: str, command: str, began: Mapping[str, Any], result: Mapping[str, Any]) -> Path:
    """Writes `results/bakeoff/NAME.json` with the command that made it and its provenance since `began`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"command": command, **since(began), **result}, indent=1) + "\n")
    temporary.replace(path)
    return path


def tables_of_chain(result: Mapping[str, Any]) -> str:
    """Agreement and learning by estimator, as Markdown tables, one of each per chain."""
    lines: list[str] = []
    for name, chain in result["chains"].items():
        policies = list(chain["agreement"])
        heads = [f"{kind}, {policy}" for policy in policies for kind in ("sign", "correlation")]
        heads += ["mean success over rounds", "tokens of a round", "mean success over tokens", "tokens to .9"]
        lines += [f"{name} chain, {chain['calls']} calls:", "", f"| estimator | {' | '.join(heads)} |"]
        lines.append("|---" * (len(heads) + 1) + "|")
        for estimator, learned in chain["learning"].items():
            cells = [
                _cell(chain["agreement"][policy][estimator][kind]) if estimator in chain["agreement"][policy] else "1"
                for policy in policies
                for kind in ("sign", "correlation")
            ]
            tokens = learned["tokens_to_0.9"]["mean"]
            cells += [_cell(learned["by_rounds"]), f"{learned['tokens_of_a_round']:,.0f}", _cell(learned["area"])]
            cells.append("–" if tokens is None else f"{tokens:,.0f}")
            lines.append(f"| {estimator} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def table_of_agent(result: Mapping[str, Any]) -> str:
    """Agreement by estimator with the advantages that branches measured, as a Markdown table."""
    kinds = ("sign", "certain_sign", "correlation")
    lines = ["| estimator | sign | sign of certain calls | correlation | no estimate |", "|---|---|---|---|---|"]
    for name, found in result["agreement"].items():
        cells = [_interval(found[kind]) for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['dropped']:.0%} |")
    return "\n".join(lines)


def draw_chain(result: Mapping[str, Any], path: Path) -> None:
    """Draws correlations with the exact advantages, and learning curves over rounds and over sampled tokens, with 95 % over
    seeds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7.5), layout="constrained")
    grid = figure.subplots(len(result["chains"]), 3, squeeze=False)
    for (left, middle, right), (name, chain) in zip(grid, result["chains"].items(), strict=True):
        _draw_agreement(left, chain["agreement"])
        left.set_title(f"{name} chain, {chain['calls']} calls", fontsize=10)
        learned = {each: chain["learning"][each] for each in DRAWN if each in chain["learning"]}
        rounds = range(len(next(iter(learned.values()))["success_by_rounds"][0]))
        _draw_learning(middle, rounds, {each: found["success_by_rounds"] for each, found in learned.items()})
        middle.set_ylabel("exact success")
        middle.legend(fontsize=8)
        _draw_learning(right, chain["tokens"], {each: found["success"] for each, found in learned.items()})
    for axes, label in zip(grid[-1], ("correlation with the exact advantage", "rounds", "sampled tokens"), strict=True):
        axes.set_xlabel(label)
    figure.savefig(path, dpi=110)


def _draw_agreement(axes: Any, agreement: Mapping[str, Any]) -> None:
    for number, (policy, found) in enumerate(agreement.items()):
        names = list(found)
        rows = np.arange(len(names))[::-1] + 0.2 * (0.5 - number) * 2
        means = np.array([found[name]["correlation"]["mean"] for name in names])
        bounds = np.array([found[name]["correlation"]["interval"] for name in names])
        spread = [means - bounds[:, 0], bounds[:, 1] - means]
        axes.errorbar(means, rows, xerr=spread, fmt="o", markersize=4, capsize=2, label=policy, color=f"C{number}")
        axes.set_yticks(np.arange(len(names))[::-1], names, fontsize=8)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_learning(axes: Any, places: Sequence[int], learned: Mapping[str, Sequence[Sequence[float]]]) -> None:
    for number, (name, seeds) in enumerate(learned.items()):
        runs = np.array(seeds)
        bands = np.array([t_interval(column) or (column[0], column[0]) for column in runs.T.tolist()])
        axes.plot(places, runs.mean(0), color=f"C{number}", label=name)
        axes.fill_between(places, bands[:, 0], bands[:, 1], color=f"C{number}", alpha=0.15, linewidth=0)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)


def _cell(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    return f"{_short(found['mean'])} ± {_short((high - low) / 2)}"


def _interval(found: Mapping[str, Any]) -> str:
    if found["mean"] is None or found["interval"] is None:
        return "–"
    low, high = found["interval"]
    return f"{_short(found['mean'])} [{_short(low)}, {_short(high)}]"


def _short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1).replace("-", "−")

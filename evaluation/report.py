"""Tables and pictures of the stored results: `results/report.md`, and `SECTION-rollouts.png`, `SECTION-cpu.png` and
`SECTION-training.png` beside it. A section has the runs of a task that start from the same kind of model on the same tasks.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evaluation.plans import FROM_SCRATCH
from evaluation.results import read_results
from trainspan_schemas.intervals import t_interval

__all__ = ["line_of", "write_report"]

Result = Mapping[str, Any]
STAGES = ("rollouts", "dataset", "train")
_BAND_SEEDS: Final = 3
"""Seeds from which on a variant's training is drawn, as a mean with a band."""
_SMOOTHED_ROUNDS: Final = 3


def line_of(result: Result) -> str:
    """Returns one line about a run."""
    checks = result["checks"]
    bad = (
        f"{len(checks['failed'])} of {checks['n']} checks failed" if checks["failed"] else f"{checks['n']} checks hold"
    )
    return (
        f"{result['task']} {result['variant']} seed {result['seed']}: {estimate(result['start'])} → "
        f"{estimate(result['end'])} after {result['rounds']} rounds, {result['rollouts']} rollouts; {bad}"
    )


def estimate(found: Mapping[str, Any]) -> str:
    """Returns mean and interval, `.065 [.038, .108]`."""
    if found["mean"] is None:
        return "–"
    interval = found["interval"]
    return _short(found["mean"]) + (f" [{_short(interval[0])}, {_short(interval[1])}]" if interval else "")


def is_separate(start: Mapping[str, Any], end: Mapping[str, Any]) -> bool:
    """Whether the end's interval is above the start's."""
    return bool(start["interval"] and end["interval"] and start["interval"][1] < end["interval"][0])


def write_report(folder: Path) -> Path:
    """Writes the report and its pictures; returns the report's path. Raises SystemExit without results."""
    results = read_results(folder)
    if not results:
        raise SystemExit(f"evaluation: {folder} has no results: python -m evaluation run TASK")
    tasks: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        tasks[section_of(result)].append(result)
    lines = ["# Results", "", "Written by `python -m evaluation report`."]
    for task, found in tasks.items():
        lines += ["", f"## {task}", "", *runs_table(found), "", *variants_table(found)]
        lines += ["", *passes_table(found), *costs_table(found), *staleness_table(found), *failures(found)]
        for axis, title in (("rollouts", "over rollouts"), ("cpu", "over CPU time")):
            if any(points(result, axis) for result in found):
                draw(found, axis, folder / f"{task}-{axis}.png")
                lines.append(f"![{task}, {title}]({task}-{axis}.png)")
        if draw_training(found, folder / f"{task}-training.png"):
            lines.append(f"![{task}, rewards of training rollouts]({task}-training.png)")
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def section_of(result: Result) -> str:
    """Returns the task, with the file of its tasks and a model from scratch if these were chosen: `game-short-scratch`."""
    if section := result.get("section"):
        return str(section)
    parts = [result["task"]]
    if name := result["settings"].get("rollouts.tasks"):
        parts.append(Path(name).stem)
    return "-".join([*parts, result["model"]] if result["model"] in FROM_SCRATCH else parts)


def runs_table(results: Iterable[Result]) -> list[str]:
    """One row per run; start and end are the same if nothing is trained in rounds."""
    lines = ["| variant | seed | start | end | separate | rounds | rollouts | CPU min | checks |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        start, end, checks = result["start"], result["end"], result["checks"]
        used = _cpu_s(result)
        has_rounds = result["rounds"] > 0
        cells = [result["variant"], result["seed"], estimate(start) if has_rounds else "–", estimate(end)]
        separate = "yes" if is_separate(start, end) else "no"
        cells += [separate if has_rounds else "–", result["rounds"], result["rollouts"]]
        cells += ["–" if used is None else f"{used / 60:.0f}"]
        cells += [f"{checks['n'] - len(checks['failed'])} of {checks['n']}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _cpu_s(result: Result) -> float | None:
    """CPU time of all processes, for a control with that of its own training; a warm start is none of a run's."""
    used: float | None = result["cpu_s"]["run"]
    own = result["cpu_s"]["preparation"] if result.get("control") in ("sft", "rejection") else 0.0
    return None if used is None else used + own


def variants_table(results: Iterable[Result]) -> list[str]:
    """One row per variant: means over seeds with Student's interval."""
    lines = ["| variant | seeds | start | end | gain |", "|---|---|---|---|---|"]
    for variant, group in _by_variant(results).items():
        starts, ends = ([result[when]["mean"] for result in group] for when in ("start", "end"))
        gains = [end - start for start, end in zip(starts, ends, strict=True)]
        has_rounds = any(result["rounds"] for result in group)
        cells = [_over(starts) if has_rounds else "–", _over(ends), _over(gains) if has_rounds else "–"]
        lines.append(f"| {variant} | {len(group)} | {' | '.join(cells)} |")
    return lines


def passes_table(results: Sequence[Result]) -> list[str]:
    """pass@k before and after, for runs that have it."""
    measured = [result for result in results if "pass_at" in result["start"] and "pass_at" in result["end"]]
    if not measured:
        return []
    ks = list(measured[0]["end"]["pass_at"])
    lines = [
        f"| variant | seed | when | {' | '.join(f'pass@{k}' for k in ks)} |",
        "|---|---|---" + "|---" * len(ks) + "|",
    ]
    for result in measured:
        for when in ("start", "end"):
            cells = [_short(result[when]["pass_at"][k]) for k in ks]
            lines.append(f"| {result['variant']} | {result['seed']} | {when} | {' | '.join(cells)} |")
    return [*lines, ""]


def costs_table(results: Sequence[Result]) -> list[str]:
    """What a round took, as means over the rounds of all seeds, and how many trained answers re-tokenize differently."""
    lines = [
        "| variant | rollouts s | dataset s | training s | sampled tokens | forwarded | trained | re-tokenized differently |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, group in _by_variant(results).items():
        rounds = [point for result in group for point in result["curve"] if point["kind"] == "round"]
        if not rounds:
            continue
        cells = [_mean((point["seconds"] or {}).get(stage) for point in rounds) for stage in STAGES]
        cells.append(_mean(point["sampled_tokens"] for point in rounds))
        cells += [_mean((point["tokens"] or {}).get(kind) for point in rounds) for kind in ("forwarded", "trained")]
        counted = [found for result in group if (found := result.get("retokenized"))]
        calls, differ = (sum(found[name] for found in counted) for name in ("calls", "differ"))
        cells.append(f"{differ} of {calls}" if calls else "–")
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 2 else []


def staleness_table(results: Iterable[Result]) -> list[str]:
    """How many versions the trained calls were behind, for variants with such calls."""
    lines = [
        "| variant | versions behind, mean | most | effective sample share, mean over rounds | least | weights bounded |",
        "|---|---|---|---|---|---|",
    ]
    for variant, group in _by_variant(results).items():
        rounds = [point for result in group for point in result["curve"] if point.get("staleness_max") is not None]
        most = max((point["staleness_max"] for point in rounds), default=0)
        if not most:
            continue
        shares = [point["effective_sample_share"] for point in rounds]
        means = [statistics.mean(point[name] for point in rounds) for name in ("staleness_mean", "bounded")]
        cells = [f"{means[0]:.2f}", most, _short(statistics.mean(shares)), _short(min(shares)), _short(means[1])]
        lines.append(f"| {variant} | {' | '.join(map(str, cells))} |")
    return [*lines, ""] if len(lines) > 2 else []


def failures(results: Iterable[Result]) -> list[str]:
    """The failed checks of all runs."""
    lines = [
        f"- {result['variant']}, seed {result['seed']}: {check['name']}: {check['detail']}"
        for result in results
        for check in result["checks"]["failed"]
    ]
    return ["Failed checks:", "", *lines, ""] if lines else []


def points(result: Result, axis: str) -> list[tuple[float, float, tuple[float, float]]]:
    """Returns (rollouts or CPU minutes, mean, interval) of each validation."""
    found = []
    for point in result["curve"]:
        at = point["rollouts"] if axis == "rollouts" else point["cpu_s"]
        if point["kind"] == "eval" and point["name"] == "validation" and point["mean"] is not None and at is not None:
            interval = point["interval"] or (point["mean"], point["mean"])
            found.append((at if axis == "rollouts" else at / 60, point["mean"], (interval[0], interval[1])))
    return found


def draw(results: Iterable[Result], axis: str, path: Path) -> None:
    """Draws each run's validations with their intervals, one color per variant; a variant without rounds is a level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    colors: dict[str, str] = {}
    for variant, group in _by_variant(results).items():
        if not any(result["rounds"] for result in group):
            level, color = statistics.mean(result["end"]["mean"] for result in group), f"C{len(colors)}"
            colors[variant] = color
            axes.axhline(level, color=color, linestyle="--", linewidth=1.2, label=f"{variant}, mean of {len(group)}")
    for result in results:
        if not result["rounds"]:
            continue
        first = result["variant"] not in colors
        color = colors.setdefault(result["variant"], f"C{len(colors)}")
        found = points(result, axis)
        if not found:
            continue
        xs, ys = [at for at, _, _ in found], [mean for _, mean, _ in found]
        spread = [
            [max(0.0, mean - low) for _, mean, (low, _) in found],
            [max(0.0, high - mean) for _, mean, (_, high) in found],
        ]
        label = result["variant"] if first else None
        axes.errorbar(xs, ys, yerr=spread, color=color, marker="o", markersize=3, capsize=2, linewidth=1.2, label=label)
    axes.set_xlabel("training rollouts" if axis == "rollouts" else "CPU minutes of all processes")
    axes.set_ylabel("held-out mean, 95 % interval")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    if colors:
        axes.legend()
    figure.savefig(path, dpi=120)


def draw_training(results: Iterable[Result], path: Path) -> bool:
    """Draws the mean reward of each round's rollouts over seeds, with Student's 95 % interval, for variants of several seeds.

    Returns False, and draws nothing, if no variant has so many.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    drawn = False
    for number, (variant, group) in enumerate(_by_variant(results).items()):
        runs = [rewards for result in group if (rewards := smoothed_rewards(result))]
        if len(runs) < _BAND_SEEDS:
            continue
        columns = list(zip(*runs, strict=False))  # a round that one of them lacks is not drawn
        rounds = [n + _SMOOTHED_ROUNDS for n in range(len(columns))]
        bands = [t_interval(column) or (column[0], column[0]) for column in columns]
        label = f"{variant}, {len(runs)} seeds"
        axes.plot(rounds, [statistics.mean(column) for column in columns], color=f"C{number}", label=label)
        lows, highs = ([band[end] for band in bands] for end in (0, 1))
        axes.fill_between(rounds, lows, highs, color=f"C{number}", alpha=0.15, linewidth=0)
        drawn = True
    if not drawn:
        return False
    axes.set_xlabel("round")
    axes.set_ylabel(f"mean reward of training rollouts\nof {_SMOOTHED_ROUNDS} rounds, 95 % over seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def smoothed_rewards(result: Result) -> list[float]:
    """Returns the mean rewards of each _SMOOTHED_ROUNDS consecutive rounds; a round without rewards ends the list."""
    rewards: list[float] = []
    for point in result["curve"]:
        if point["kind"] == "round":
            if point["reward"] is None:
                break
            rewards.append(point["reward"])
    return [statistics.mean(rewards[n : n + _SMOOTHED_ROUNDS]) for n in range(len(rewards) - _SMOOTHED_ROUNDS + 1)]


def _by_variant(results: Iterable[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result["variant"]].append(result)
    return groups


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):,.0f}" if known else "–"


def _over(values: Sequence[float]) -> str:
    interval = t_interval(values)
    mean = _short(statistics.mean(values))
    return mean + (f" [{_short(interval[0])}, {_short(interval[1])}]" if interval else "")


def _short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"

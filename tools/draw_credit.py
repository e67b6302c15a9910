"""Draws the figures and prints the tables of docs/credit-assignment.md, using the estimators themselves.

    python tools/draw_credit.py [FOLDER]

The same code produces the same bytes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from trainspan_processing.credit.advantages import assign_advantages
from trainspan_processing.credit.plan import CreditPlan, make_plan
from trainspan_processing.rewards.names import rollout_column, step_column
from trainspan_processing.tables import HISTORY
from trainspan_schemas.config.settings import DatasetSettings

REWARD = "reward"


@dataclass(frozen=True)
class Call:
    """One call of the worked example."""

    says: str
    agent: str
    state: str
    """Equal for calls with the same prompt."""
    step_reward: float | None = None


@dataclass(frozen=True)
class Rollout:
    name: str
    reward: float
    calls: tuple[Call, ...]


WORKED = (
    Rollout(
        "a", 1.0, (Call("6*4", "solver", "task"), Call("16+24", "solver", "24"), Call("answer 40", "writer", "24, 40"))
    ),
    Rollout(
        "b", 0.0, (Call("16+6", "solver", "task"), Call("22*4", "solver", "22"), Call("answer 88", "writer", "22, 88"))
    ),
    Rollout("c", 0.0, (Call("6*4", "solver", "task"), Call("answer 24", "writer", "24"))),
    Rollout(
        "d",
        1.0,
        (
            Call("6x4", "solver", "task", -0.2),
            Call("6*4", "solver", "error"),
            Call("16+24", "solver", "error, 24"),
            Call("answer 40", "writer", "error, 24, 40"),
        ),
    ),
)
"""Four rollouts of the task 16+6*4. Rollout d first mistypes a multiplication: the tool fails, which costs it 0.2."""

ESTIMATORS: dict[str, dict[str, object]] = {
    "identical, grpo": {},
    "identical, dr_grpo": {"baseline": "dr_grpo"},
    "identical, rloo": {"baseline": "rloo"},
    "return_to_go, dr_grpo": {"credit": "return_to_go", "baseline": "dr_grpo"},
    "return_to_go γ 0.5, dr_grpo": {"credit": "return_to_go", "baseline": "dr_grpo", "gamma": 0.5},
    "identical, dr_grpo over calls": {"baseline": "dr_grpo", "group_over": "calls"},
    "gigpo, dr_grpo": {"credit": "gigpo", "baseline": "dr_grpo"},
    "per_agent, dr_grpo": {"credit": "per_agent", "baseline": "dr_grpo"},
}


def plan_of(settings: dict[str, object]) -> CreditPlan:
    return make_plan(DatasetSettings(**settings), has_tasks=True)  # type: ignore[arg-type]


def frames(rollouts: Sequence[Rollout], group: int = 0, first: int = 0) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Returns the calls and rollouts of one group as input of the estimators, numbered from `first`."""
    calls = []
    for number, rollout in enumerate(rollouts):
        turns: dict[str, int] = {}
        for position, call in enumerate(rollout.calls):
            turn = turns[call.agent] = turns.get(call.agent, -1) + 1
            calls.append(
                {
                    "rollout": first + number,
                    "position": position,
                    "request": position + 1,
                    "agent": call.agent,
                    "turn": turn,
                    "state": call.state,
                    step_column(REWARD): call.step_reward,
                    rollout_column(REWARD): rollout.reward,
                }
            )
    kinds = {"rollout": pl.UInt32, "position": pl.UInt32, "request": pl.UInt32, step_column(REWARD): pl.Float64}
    facts = pl.DataFrame(
        {
            "rollout": range(first, first + len(rollouts)),
            "group": [group] * len(rollouts),
            "run_id": ["run"] * len(rollouts),
            "judge": None,
            "end_ns": range(first, first + len(rollouts)),
            "rollout_id": [f"{first + number:08d}" for number in range(len(rollouts))],
            "attempt": [0] * len(rollouts),
            "is_branch": False,
        },
        schema_overrides={"rollout": pl.UInt32, "group": pl.UInt32, "attempt": pl.Int32, "judge": pl.String},
    )
    return pl.DataFrame(calls, schema_overrides=kinds), facts


def worked() -> dict[str, list[list[float]]]:
    """Returns estimator → advantages of the calls of each rollout in the worked example."""
    calls, rollouts = frames(WORKED)
    found: dict[str, list[list[float]]] = {}
    for name, settings in ESTIMATORS.items():
        credited = assign_advantages(calls, rollouts, pl.DataFrame(schema=HISTORY), plan_of(settings)).calls
        by_rollout = credited.sort("rollout", "position").group_by("rollout", maintain_order=True).agg("advantage")
        found[name] = by_rollout["advantage"].to_list()
    return found


def worked_table() -> str:
    """Returns the advantages as a Markdown table."""
    head = [f"{rollout.name}{position}" for rollout in WORKED for position in range(len(rollout.calls))]
    lines = [f"| estimator | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name, advantages in worked().items():
        cells = [f"{value:+.2f}".replace("-", "−").replace("+0.00", "0") for values in advantages for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def discrimination(turns: int, *, dense: bool, credit: str, seed: int = 0, groups: int = 200, size: int = 8) -> float:
    """Returns the correlation of advantages with good calls over simulated rollouts of `turns` calls.

    A call is good with probability 0.7; its state is the number of bad calls before it. Sparse: the rollout earns 1 if
    at most a tenth of its calls are bad. Dense: each good call earns 1/turns at once.
    """
    random = np.random.default_rng(seed)
    good = random.random((groups * size, turns)) < 0.7
    outcome = np.zeros(groups * size) if dense else ((~good).sum(1) <= turns / 10).astype(float)
    steps = good / turns if dense else None
    number = np.arange(groups * size)
    bad_before = (~good).cumsum(1) - ~good
    calls = pl.DataFrame(
        {
            "rollout": np.repeat(number, turns),
            "position": np.tile(np.arange(turns), groups * size),
            "request": np.tile(np.arange(1, turns + 1), groups * size),
            "agent": ["agent"] * good.size,
            "turn": np.tile(np.arange(turns), groups * size),
            "state": [f"{turn} calls, {bad} bad" for row in bad_before for turn, bad in enumerate(row)],
            step_column(REWARD): steps.ravel() if steps is not None else [None] * good.size,
            rollout_column(REWARD): np.repeat(outcome, turns),
        },
        schema_overrides={
            "rollout": pl.UInt32,
            "position": pl.UInt32,
            "request": pl.UInt32,
            "turn": pl.Int32,
            step_column(REWARD): pl.Float64,
        },
    )
    rollouts = pl.DataFrame(
        {
            "rollout": number,
            "group": number // size,
            "run_id": ["run"] * len(number),
            "judge": None,
            "end_ns": number,
            "rollout_id": [f"{each:08d}" for each in number],
            "attempt": [0] * len(number),
            "is_branch": False,
        },
        schema_overrides={"rollout": pl.UInt32, "group": pl.UInt32, "attempt": pl.Int32, "judge": pl.String},
    )
    plan = plan_of({"credit": credit, "baseline": "dr_grpo"})
    credited = assign_advantages(calls, rollouts, pl.DataFrame(schema=HISTORY), plan).calls.sort("rollout", "position")
    return float(np.corrcoef(credited["advantage"].to_numpy(), good.ravel())[0, 1])


def without_contrast(success: float, size: int) -> float:
    """Returns the probability that all `size` rollouts of a task succeed or all fail, so that nothing is learned."""
    return float(success**size + (1 - success) ** size)


def draw(folder: Path) -> list[Path]:
    """Writes the figures; returns their paths."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "trainspan", "svg.fonttype": "none", "font.size": 9})
    return [
        _draw_worked(folder / "credit-worked.svg"),
        _draw_discrimination(folder / "credit-discrimination.svg"),
        _draw_contrast(folder / "credit-contrast.svg"),
    ]


def _save(figure: object, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})  # type: ignore[attr-defined]
    return path


def _draw_worked(path: Path) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, (name, advantages) in zip(figure.subplots(4, 2).ravel(), worked().items(), strict=True):
        greatest = max(abs(value) for values in advantages for value in values)
        for row, (rollout, values) in enumerate(zip(WORKED, advantages, strict=True)):
            for column, (call, value) in enumerate(zip(rollout.calls, values, strict=True)):
                shade = 0.75 * abs(value) / greatest
                color = (
                    (1 - shade, 1 - 0.25 * shade, 1 - shade) if value > 0 else (1 - 0.1 * shade, 1 - shade, 1 - shade)
                )
                box = Rectangle((column, -row), 0.94, 0.86, facecolor=color, edgecolor="#8c959f", linewidth=0.5)
                axes.add_patch(box)
                shown = f"{call.says}  {value:+.2f}".replace("-", "−", 1) if value else f"{call.says}  0"
                axes.text(column + 0.47, -row + 0.43, shown, ha="center", va="center", fontsize=7.5)
            axes.text(-0.08, -row + 0.43, f"{rollout.name}: {rollout.reward:g}", ha="right", va="center", fontsize=8)
        axes.set(xlim=(-0.55, 4), ylim=(-3.1, 0.95))
        axes.set_title(name, fontsize=9, loc="left")
        axes.axis("off")
    return _save(figure, path)


def _draw_discrimination(path: Path) -> Path:
    from matplotlib.figure import Figure

    lengths = (1, 2, 3, 5, 8, 12, 20, 30)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, dense in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        for credit, mark in (("identical", "o-"), ("return_to_go", "s--"), ("gigpo", "d-."), ("step", "^:")):
            if credit == "step" and not dense:
                continue  # without step rewards it trains only the last call
            values = [discrimination(turns, dense=dense, credit=credit) for turns in lengths]
            axes.plot(lengths, values, mark, label=credit, markersize=4)
        axes.set_title("every call earns its own reward" if dense else "one reward at the end", fontsize=9)
        axes.set_xlabel("calls of a rollout")
        axes.set_ylim(0, 1.05)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("correlation of advantage\nand quality of the call")
    return _save(figure, path)


def _draw_contrast(path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    success = np.linspace(0, 1, 101)
    for size in (2, 4, 8, 16, 32):
        axes.plot(success, [without_contrast(float(p), size) for p in success], label=f"n = {size}")
    axes.set(xlabel="success rate of the task", ylabel="groups without contrast", ylim=(0, 1), xlim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs"
    sys.stdout.write(worked_table() + "\n")
    for picture in draw(target):
        sys.stdout.write(f"{picture} {picture.stat().st_size} bytes\n")

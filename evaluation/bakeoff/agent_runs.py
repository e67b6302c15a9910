"""The bake-off on an agent: stored rollouts, true advantages from many branches, and every estimator's advantages of them.

Stages are stored and resumed: rollouts, a few branches for `vine`, many branches for the truth, scores.
"""

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from evaluation.bakeoff.estimators import ESTIMATORS, Estimate
from evaluation.bakeoff.scores import agreement
from evaluation.bakeoff.services import AgentWorld, agent_world
from evaluation.environments import prepare
from evaluation.models import make_untrained, warm_started
from evaluation.plans import Plan
from evaluation.task_files import read_lines, write_lines
from trainspan_processing.dataset.ledger import NOTHING_USED, read_ledger
from trainspan_processing.explain.dry_run import dry_run
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.rewards.air import AIR
from trainspan_processing.tables import SPAN_KEY
from trainspan_processing.traces.trace_index import index_traces
from trainspan_schemas.config.settings import DatasetSettings

__all__ = ["AgentBakeoff", "run_agent", "scores_of"]

BASE: Final = "base"
SMALL_M: Final = 4
RESAMPLES: Final = 1000


@dataclass(frozen=True, slots=True)
class AgentBakeoff:
    """Sizes of a bake-off on an agent."""

    tasks: int = 8
    """Training tasks, the first ones of the file."""
    n: int = 8
    """Rollouts of each."""
    branched: int = 16
    """Rollouts whose calls are measured, chosen by a hash."""
    m: int = 32
    """Branches from each state for the truth."""
    calls: str = "all"
    """As `trainspan branch --calls`."""


def run_agent(plan: Plan, sizes: AgentBakeoff) -> dict[str, Any]:
    """Runs what is missing of all stages; returns the result. Raises SystemExit if the task's agent is a harness."""
    if not (target := plan.loaded().loop.target):
        raise SystemExit(f"evaluation: a bake-off needs an agent of our own, and that of {plan.task} is a harness")
    prepare(plan)
    make_untrained(plan)
    model = str(warm_started(plan)) if plan.warm_steps else plan.start
    folder = (
        plan.workspace / "bakeoff" / f"{plan.variant}-{'-'.join(map(str, asdict(sizes).values()))}".replace(":", "")
    )
    began_s = time.monotonic()
    stages: dict[str, Any] = {}
    with agent_world(plan, folder, model) as world:
        tasks = _tasks(plan, folder, sizes.tasks)
        rolled = ("rollout", "--tasks", str(tasks), "--n", str(sizes.n), "--run", BASE, *_judge(plan), target)
        stages["rollouts"] = _stage(world, "rollouts", lambda: world.command(*rolled, *_resume(world, BASE)))
        few = _stage(world, "few", lambda: _branch(world, sizes, "few", SMALL_M))
        estimates = _stage(world, "estimates", lambda: _estimates(world, plan.loaded().dataset))
        truth = _stage(world, "truth", lambda: _branch(world, sizes, "truth", sizes.m))
    stages |= {"vine m 4": few, "truth": truth}
    costs = {name: _cost(stage) for name, stage in stages.items()}
    return {
        "task": plan.task,
        "model": plan.model_name,
        "warm_steps": plan.warm_steps,
        "sizes": asdict(sizes),
        "reward": stages["rollouts"].get("mean_reward"),
        "costs": costs,
        "seconds": round(time.monotonic() - began_s, 1),
        **scores_of(truth["rollouts"], estimates["advantages"]),
    }


def scores_of(truth: list[Mapping[str, Any]], estimates: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, Any]:
    """Agreement by estimator with 95 % intervals of a bootstrap over rollouts, on the calls whose truth was measured.

    The first calls are left out: the value of their state is the group's mean, which estimators use too.
    `certain` calls have a true advantage whose interval excludes 0.
    """
    measured = [
        {**{key: call[key] for key in SPAN_KEY}, "rollout": rollout["rollout_id"], "true": call["advantage"],
         "certain": call["interval"] is not None and not call["interval"][0] <= 0 <= call["interval"][1]}
        for rollout in truth
        for call in rollout["calls"]
        if call["advantage"] is not None and call["value"]["by"] == "branches"
    ]  # fmt: skip
    schema = {**dict.fromkeys((*SPAN_KEY, "rollout"), pl.String), "true": pl.Float64, "certain": pl.Boolean}
    calls = pl.DataFrame(measured, schema=schema)
    found = {}
    for name, estimated in estimates.items():
        own = pl.DataFrame(
            estimated,
            schema={**dict.fromkeys(SPAN_KEY, pl.String), "advantage": pl.Float64},
        )
        joined = calls.join(own, on=SPAN_KEY, how="left", maintain_order="left")
        found[name] = _agreement(joined)
    return {
        "calls": calls.height,
        "certain": int(calls["certain"].sum()),
        "rollouts": calls["rollout"].n_unique(),
        "agreement": found,
    }


def _agreement(calls: pl.DataFrame) -> dict[str, Any]:
    """Point estimates and bootstrap intervals; rollouts are drawn, because their calls are not independent."""
    rng = random.Random(0)
    parts = calls.partition_by("rollout", maintain_order=True)
    drawn = [
        _scores(pl.concat([parts[rng.randrange(len(parts))] for _ in parts])) for _ in range(RESAMPLES if parts else 0)
    ]
    point = _scores(calls)
    kinds = ("sign", "certain_sign", "correlation")
    bounds = {kind: _bounds([one[kind] for one in drawn]) for kind in kinds}
    return {**{kind: {"mean": point[kind], "interval": bounds[kind]} for kind in kinds}, "dropped": point["dropped"]}


def _scores(calls: pl.DataFrame) -> dict[str, float | None]:
    certain = calls.filter("certain")
    whole, sure = (
        agreement(part["advantage"].fill_null(0.0), part["true"], part["advantage"].is_null())
        for part in (calls, certain)
    )
    found = {"sign": whole.sign, "certain_sign": sure.sign, "correlation": whole.correlation, "dropped": whole.dropped}
    return {name: value if np.isfinite(value) else None for name, value in found.items()}


def _bounds(values: list[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = np.quantile(known, (0.025, 0.975))
    return float(low), float(high)


def _estimates(world: AgentWorld, settings: DatasetSettings) -> dict[str, Any]:
    """The `advantages` of all calls of the rollouts by estimator; without those by AIR if its rules find nothing."""
    found: dict[str, Any] = {}
    for name, estimate in ESTIMATORS.items():
        if estimate.vine is not None and name != f"vine m {SMALL_M}":
            continue
        run = _dry_run(world, settings, estimate)
        if estimate.dataset.air and run.rewarded.edges.filter(pl.col("name") == AIR).is_empty():
            continue
        calls = run.calls.filter(pl.col("drop").is_null()).drop_nulls("advantage")
        found[name] = calls.select(*SPAN_KEY, "advantage").to_dicts()
    return {"advantages": found}


def _dry_run(world: AgentWorld, settings: DatasetSettings, estimate: Estimate) -> Any:
    chosen = replace(settings, **{"group_over": "rollouts", **estimate.settings})
    with Source([str(world.store)]) as source:
        traces = index_traces(source, Selection(BASE), NOTHING_USED, now_ns=time.time_ns(), settle_s=settings.settle_s)
        return dry_run(source, traces, chosen, read_ledger(world.folder / "no-datasets"))


def _branch(world: AgentWorld, sizes: AgentBakeoff, run: str, m: int) -> dict[str, Any]:
    chosen = ("--calls", sizes.calls, "--limit", str(sizes.branched), "--n", str(m), "--run", run)
    return world.command("branch", "--of-run", BASE, *chosen, *_resume(world, run))


def _stage(world: AgentWorld, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The stored result of a stage, or that of `make`, which is then stored."""
    path = world.folder / f"{name}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    began_s = time.monotonic()
    made = {**make(), "stage_s": round(time.monotonic() - began_s, 1)}
    path.write_text(json.dumps(made))
    return made


def _resume(world: AgentWorld, run: str) -> list[str]:
    """`--resume` if the runner has begun with this run."""
    begun = [file for file in (world.folder / "rollouts" / run).glob("*.jsonl") if "branch-points" not in file.name]
    return ["--resume"] if begun else []


def _judge(plan: Plan) -> list[str]:
    judge = plan.loaded().rollouts.judge
    return ["--judge", judge] if judge else []


def _tasks(plan: Plan, folder: Path, count: int) -> Path:
    """Writes the first training tasks of the plan's file."""
    source = plan.tasks.parent / plan.settings.get("rollouts.tasks", plan.tasks.name)
    chosen = [task for task in read_lines(source) if task["split"] == "train"][:count]
    path = folder / "tasks.jsonl"
    write_lines(path, chosen)
    return path


def _cost(stage: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage took; `stage_s` includes the start of the command."""
    kept = ("total", "status", "calls", "sampled_tokens", "seconds", "states", "skipped_states", "skipped", "diverged")
    return {name: stage[name] for name in (*kept, "stage_s") if name in stage}

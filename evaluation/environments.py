"""The environment of a task's agents: its pinned packages and this repository's base install."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from evaluation.plans import FOLDER, ROOT, Plan, folder_of, pins_of

__all__ = ["prepare"]


def prepare(plan: Plan) -> None:
    """Installs the environment and writes the tasks, if they are missing or what they are made from has changed.

    With new tasks all models go that were made from the tasks before.
    """
    pins, environment = pins_of(plan.task), plan.workspace / "environment"
    if pins and not _is_current(environment, pins):
        print(f"installing {environment} with {pins.relative_to(ROOT)}", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        install(environment, pins)
        shutil.copy(pins, environment / "pins.txt")
    sources, noted = _sources(plan), plan.tasks.parent / "sources.txt"
    if not noted.exists() or noted.read_text() != sources:
        for made in (*plan.workspace.glob("warm-*"), *plan.workspace.glob("*-model"), *plan.workspace.glob("data")):
            shutil.rmtree(made)
        print(f"writing tasks to {plan.tasks.parent}", flush=True)
        subprocess.run([plan.python, folder_of(plan.task) / "tasks.py", plan.tasks.parent], check=True)
        noted.write_text(sources)


def install(environment: Path, pins: Path) -> None:
    """Makes a virtual environment with exactly the pinned packages, and trainspan from this checkout."""
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    # The pins are complete, so nothing is resolved: inspect-evals and jericho come without packages that are not used.
    subprocess.run([*pip, "--no-deps", "--requirement", pins], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)


def _sources(plan: Plan) -> str:
    """The hash of the pins and of the task's own modules and prompt, except those that a run reads anew."""
    folder = folder_of(plan.task)
    files = [*sorted(folder.glob("*.py")), *sorted(folder.glob("home/*")), FOLDER / "task_files.py", pins_of(plan.task)]
    found = [path for path in files if path is not None and path.name not in ("agent.py", "judge.py", "demo.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest() + "\n"


def _is_current(environment: Path, pins: Path) -> bool:
    copy = environment / "pins.txt"
    return copy.exists() and copy.read_bytes() == pins.read_bytes()

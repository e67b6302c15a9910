"""Makes the run of the walk in docs/view.md: its reward does not rise, for three reasons.

python examples/view_walk/run.py
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from problems import KINDS, problem

from trainspan_schemas.home import home

HERE = Path(__file__).parent
TASKS = 400


def make_tasks() -> list[dict[str, str]]:
    """As many tasks of each kind; every fifth one is for validation."""
    generator = random.Random(0)
    tasks = []
    for number in range(TASKS):
        kind = KINDS[number % len(KINDS)]
        one = problem(kind, generator)
        split = "val" if number // len(KINDS) % 5 == 0 else "train"
        tasks.append({"id": f"{kind}-{number:03d}", "input": one.text, "answer": one.answer, "split": split})
    return tasks


def make_model(folder: Path) -> None:
    unfinished = folder.with_name(f".{folder.name}")
    quiet = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([sys.executable, str(HERE / "policy.py"), str(unfinished)], env=quiet, check=True)
    unfinished.rename(folder)


def main() -> int:
    workspace = home() / "view_walk"
    workspace.mkdir(parents=True, exist_ok=True)
    tasks = workspace / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in make_tasks()))
    if not (workspace / "model").exists():
        make_model(workspace / "model")
    environ = {
        **os.environ,
        "TRAINSPAN_TRAIN__MODEL": str(workspace / "model"),
        "TRAINSPAN_ROLLOUTS__TASKS": str(tasks),
    }
    command = [sys.executable, "-m", "trainspan_cli", "loop", "--config", str(HERE / "trainspan.toml")]
    return subprocess.run(command, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

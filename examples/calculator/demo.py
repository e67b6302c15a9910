"""`make demo-tiny`: creates a small model from scratch, which learns to calculate with a tool."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from problems import Problem
from rich.console import Console
from tasks import HELDOUT_TASKS, task_files

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from demo_run import Demo, main  # noqa: E402 -- beside this folder


def make_model(folder: Path, console: Console) -> None:
    """Creates tokenizer and model, and warms the model up on imperfect demonstrations."""
    began = time.monotonic()
    unfinished = folder.with_name(f".{folder.name}")
    with console.status(
        "creating a model from scratch: tokenizer, 0.64 million weights, supervised warm-up (about a minute)"
    ):
        made = subprocess.run(
            [sys.executable, str(HERE / "policy.py"), str(unfinished)],
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},  # spinning threads double the time on a busy machine
            capture_output=True,
            text=True,
            check=False,
        )
    if made.returncode != 0:
        sys.exit(f"trainspan: creating the model failed: {(made.stderr.strip().splitlines() or ['no message'])[-1]}")
    unfinished.rename(folder)
    loss = json.loads(made.stdout.strip().splitlines()[-1])["loss"]
    console.print(
        f"model created in {time.monotonic() - began:.0f} s (loss {loss:.3f})", highlight=False, soft_wrap=True
    )


def shared(trained: Sequence[dict[str, Any]], heldout: Sequence[dict[str, Any]]) -> int:
    """Returns the number of held-out tasks whose operands occur in training, or that are not of the held-out part."""
    seen = {tuple(one["meta"]["operands"]) for one in trained}
    held_out = {tuple(one["meta"]["operands"]) for one in heldout}
    return sum(one in seen or not Problem(*one, "+*").is_heldout for one in held_out)


if __name__ == "__main__":
    demo = Demo(
        folder=HERE,
        heldout_tasks=HELDOUT_TASKS,
        start_range=(0.10, 0.40),
        least_gain=0.30,
        make_model=make_model,
        make_tasks=task_files,
        shared=shared,
    )
    sys.exit(main(demo))

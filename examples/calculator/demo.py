"""`make demo-tiny`: creates a small model from scratch, which learns to calculate with a tool."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from problems import Problem, problems
from rich.console import Console

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from demo_run import Demo, main  # noqa: E402 -- beside this folder

SEED = 0
TRAIN_TASKS, HELDOUT_TASKS, PROBE_TASKS = 4000, 500, 200


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


def task(problem: Problem, name: str, split: str) -> dict[str, Any]:
    """Returns a line of a task file."""
    operands = [problem.a, problem.b, problem.c]
    return {"id": name, "input": problem.text, "answer": problem.answer, "split": split, "meta": {"operands": operands}}


def make_tasks() -> dict[str, list[dict[str, Any]]]:
    streams = {part: problems(part, SEED) for part in ("train", "heldout", "probe")}  # type: ignore[arg-type]
    tasks = [task(next(streams["train"]), f"train-{n:04d}", "train") for n in range(TRAIN_TASKS)]
    tasks += [task(next(streams["heldout"]), f"heldout-{n:04d}", "val") for n in range(HELDOUT_TASKS)]
    probe = [task(next(streams["probe"]), f"probe-{n:04d}", "val") for n in range(PROBE_TASKS)]
    return {"tasks.jsonl": tasks, "probe.jsonl": probe}


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
        make_tasks=make_tasks,
        shared=shared,
    )
    sys.exit(main(demo))

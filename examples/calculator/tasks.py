"""Writes the tasks of the calculator agent: `tasks.jsonl`, `probe.jsonl` and, for supervised training, `demonstrations.jsonl`.

python tasks.py FOLDER
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from problems import Problem, conversation, problems

SEED = 0
TRAIN_TASKS, HELDOUT_TASKS, PROBE_TASKS, DEMONSTRATIONS = 4000, 500, 200, 400


def task(problem: Problem, name: str, split: str) -> dict[str, Any]:
    """Returns a line of a task file."""
    operands = [problem.a, problem.b, problem.c]
    return {"id": name, "input": problem.text, "answer": problem.answer, "split": split, "meta": {"operands": operands}}


def task_files() -> dict[str, list[dict[str, Any]]]:
    """File name → tasks; the probe has operator pairs that never occur in training."""
    streams = {part: problems(part, SEED) for part in ("train", "heldout", "probe")}  # type: ignore[arg-type]
    tasks = [task(next(streams["train"]), f"train-{n:04d}", "train") for n in range(TRAIN_TASKS)]
    tasks += [task(next(streams["heldout"]), f"heldout-{n:04d}", "val") for n in range(HELDOUT_TASKS)]
    probe = [task(next(streams["probe"]), f"probe-{n:04d}", "val") for n in range(PROBE_TASKS)]
    return {"tasks.jsonl": tasks, "probe.jsonl": probe}


def demonstrations() -> list[dict[str, Any]]:
    """Returns what a perfect solver would do with the first training tasks: prompt, then completion to learn."""
    found = []
    for problem in itertools.islice(problems("train", SEED), DEMONSTRATIONS):
        messages = conversation(problem, [operation for operation, _ in problem.steps()])
        found.append({"prompt": messages[:1], "completion": messages[1:]})
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in {"demonstrations.jsonl": demonstrations(), **task_files()}.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

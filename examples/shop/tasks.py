"""Writes the tasks of the shopping agent: `python tasks.py FOLDER` writes `tasks.jsonl` and `demonstrations.jsonl` there."""

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent import conversation
from problems import Problem, problems

SEED = 0
TRAIN_TASKS, HELDOUT_TASKS, DEMONSTRATIONS = 1000, 300, 400


def task(problem: Problem, name: str, split: str) -> dict[str, Any]:
    """Returns a line of a task file."""
    meta = {"numbers": problem.numbers, "calculation": problem.calculation}
    return {"id": name, "input": problem.text, "answer": problem.answer, "split": split, "meta": meta}


def tasks() -> list[dict[str, Any]]:
    """Returns the training tasks, then the held-out ones."""
    train, heldout = (
        [
            task(problem, f"{part}-{n:04d}", split)
            for n, problem in enumerate(itertools.islice(problems(part, SEED), size))
        ]
        for part, split, size in (("train", "train", TRAIN_TASKS), ("heldout", "val", HELDOUT_TASKS))
    )
    return train + heldout


def demonstrations(drawn: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what a perfect solver would do with training tasks: the agent's prompt, then the completion to learn."""
    training = itertools.islice((one for one in drawn if one["split"] == "train"), DEMONSTRATIONS)
    return [
        {
            "prompt": conversation(one["input"]),
            "completion": [
                {"role": "assistant", "content": f"calc: {one['meta']['calculation']}"},
                {"role": "user", "content": f"result: {one['answer']}"},
                {"role": "assistant", "content": f"answer: {one['answer']}"},
            ],
        }
        for one in training
    ]


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    folder, drawn = Path(sys.argv[1]), tasks()
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "demonstrations.jsonl", demonstrations(drawn))
    write(folder / "tasks.jsonl", drawn)

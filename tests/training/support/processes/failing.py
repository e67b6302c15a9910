"""Runs pairs of processes that train together (gloo), one failing at a chosen place; prints how both end as JSON.

Usage: python -m tests.training.support.processes.failing MODEL_DIR DATASET_DIR OUT_DIR PLACE:RANK[:split] …. Each process is a
fork of this one, which has imported everything and computed nothing.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.training.support.processes.imports import import_once
from tests.training.support.processes.pair import FSDP
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import DatasetError, TrainspanError
from trainspan_training.session import TrainJob, train

PLACES = {
    "load": "rounds.setup:load_tokenizer",
    "read": "rounds.reading:read_calls",
    "plan": "rounds.reading:plan_steps",
    "build": "data.steps:make_batches",
    "canary": "rounds.canary:score_prompts",
    "old": "objective.logprobs:Scorer.logprobs",
    "step": "objective.grpo_trainer:TransitionGRPOTrainer.accumulate",
    "middle": "objective.grpo_trainer:TransitionGRPOTrainer._compute_loss",
    "check": "objective.logprobs:Scorer.measure",
    "write": "model.full_weights:write_tensors",
    "save": "rounds.saving:hash_of",
    "publish": "rounds.publication:swap_in",
    "restore": "model.full_weights:FullWeights.restore",
}
"""Place in a round → the function that fails. `read` raises a dataset's usual error, the others unexpected ones."""
LEADERS = ("plan", "save", "publish")
"""Places that only the leader reaches."""
LIMIT_S = 90.0
"""Time limit of a pair; then it is killed."""


def main(model: Path, dataset: Path, out: Path, cases: list[str]) -> None:
    import_once()
    report = {}
    for case in cases:
        folder = out / case.replace(":", "-")
        folder.mkdir()
        exits = _run_pair(model, dataset, folder, *case.split(":"))
        ends = [
            json.loads((folder / f"{rank}.json").read_text()) if code == 1 else None for rank, code in exits.items()
        ]
        report[case] = {"exits": list(exits.values()), "ends": ends}
    sys.stdout.write(json.dumps(report) + "\n")


def _run_pair(model: Path, dataset: Path, folder: Path, place: str, failing: str, *split: str) -> dict[int, int]:
    """Exit code of each rank: 0 without an error, 1 with a reported one, 2 with another, negative if it was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | (FSDP if split else {})
    children: dict[int, int] = {}
    for rank in (0, 1):
        if not (pid := os.fork()):
            os.environ.update(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            _train(model, dataset, folder, rank, place, fails=rank == int(failing))
        children[pid] = rank
    exits: dict[int, int] = {}
    until = time.monotonic() + LIMIT_S
    while len(exits) < len(children):
        for pid, rank in children.items():
            if rank in exits:
                continue
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                exits[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return dict(sorted(exits.items()))


def _train(model: Path, dataset: Path, folder: Path, rank: int, place: str, *, fails: bool) -> NoReturn:
    if fails:
        _plant(place)
    going_back = {"max_kl": 1e-12, "target_kl": 0.0} if place == "restore" else {}
    settings = TrainSettings(model=str(model), policy_url="none", old_policy="recompute", **going_back)
    code = 0
    try:
        train(TrainJob(settings, dataset, folder / "checkpoints"), lambda *_: None, lambda _: None)
    except TrainspanError as error:
        (folder / f"{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
        code = 1
    except BaseException:  # noqa: BLE001  # printed, and counted as a different ending
        traceback.print_exc()
        code = 2
    finally:
        os._exit(code)


def _plant(place: str) -> None:
    module, _, path = PLACES[place].partition(":")
    *owner, name = path.split(".")
    target: Any = importlib.import_module(f"trainspan_training.{module}")
    for part in owner:
        target = getattr(target, part)

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise (DatasetError if place == "read" else RuntimeError)(f"planted in {place}")

    setattr(target, name, fail)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]), sys.argv[4:])

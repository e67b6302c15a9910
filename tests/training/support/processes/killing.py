"""Trains four datasets repeatedly, each time killed at a chosen moment of the first three rounds and resumed.

Prints the resulting state as JSON.

Usage: python -m tests.training.support.processes.killing MODEL_DIR DATASETS_DIR OUT_DIR MOMENTS. Each run is a fork of this
process, which has imported everything and computed nothing. A moment is the n-th file operation under the checkpoints,
or optimizer step; one of them is always the renaming of Adam's state of the second round, whose policy is published by
then.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.training.support.processes.imports import import_once
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta
from trainspan_schemas.artifacts.trained_tokens import parts
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.checkpoints.folder import Checkpoints
from trainspan_training.metrics.round_record import read_records
from trainspan_training.session import TrainJob, train

DATASETS = 4
STEPS = 2
"""One step of all four rollouts, made twice."""
_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile"}


def main(model: Path, datasets: Path, out: Path, moments: int) -> None:
    import_once()

    def job(checkpoints: Path) -> TrainJob:
        opened = Checkpoints(checkpoints)  # recovers from the kill, as the trainer will
        done = len({entry.dataset for entry in opened.ledger.entries})
        opened.close()
        settings = TrainSettings(
            model=str(model), policy_url="none", learning_rate=1e-4, rollouts_per_step=4, passes=STEPS
        )
        return TrainJob(settings, datasets, checkpoints, follow=True, rounds=DATASETS - done)

    def go(checkpoints: Path, moment: int | None) -> int:
        """Runs a child; returns its wait status, 9 if it was killed."""
        pid = os.fork()
        if pid:
            return os.waitpid(pid, 0)[1]
        counter = _count_events(checkpoints, moment)
        todo = job(checkpoints)
        if todo.rounds:
            train(todo, lambda *_: None, lambda _: None)
        (checkpoints / "events").write_text(json.dumps(counter))
        os._exit(0)

    status = go(out / "whole", None)
    assert status == 0, status
    seen = json.loads((out / "whole/events").read_text())
    events = seen["step"][STEPS * (DATASETS - 1)]
    chosen = sorted([(2 * index + 1) * events // (2 * moments) for index in range(moments)] + [seen["state"][1]])
    report: dict[str, Any] = {"events": events, "whole": _state(out / "whole"), "killed": []}
    for moment in chosen:
        folder = out / f"killed-{moment}"
        killed = go(folder, moment)
        left = sorted(path.name for path in folder.glob("policy-*")) if folder.exists() else []
        resumed = go(folder, None)
        report["killed"].append(
            {"moment": moment, "killed": killed, "left": left, "resumed": resumed, "state": _state(folder)}
        )
    sys.stdout.write(json.dumps(report) + "\n")


def _count_events(checkpoints: Path, moment: int | None) -> dict[str, list[int]]:
    """Kills this process at the moment; returns the moments so far of optimizer steps and of complete Adam states."""
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    seen = 0
    moments: dict[str, list[int]] = {"step": [], "state": []}

    def note(kind: str | None = None) -> None:
        nonlocal seen
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind:
            moments[kind].append(seen)
        seen += 1

    def audit(event: str, arguments: Any) -> None:
        if event in _OPERATIONS and arguments and str(arguments[0]).startswith(str(checkpoints)):
            note("state" if event == "os.rename" and "optimizer/" in str(arguments[0]) else None)

    step = TransitionGRPOTrainer.training_step

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        note("step")
        return step(self, *arguments, **named)

    TransitionGRPOTrainer.training_step = counted  # type: ignore[method-assign]
    sys.addaudithook(audit)
    return moments


def _state(checkpoints: Path) -> dict[str, Any]:
    """State that must not depend on a kill: weights, their lineage, Adam's state, tokens, records, and leftovers."""
    names = sorted(folder.name for folder in checkpoints.glob("policy-??????"))
    metas = [CheckpointMeta.read(checkpoints / name) for name in names]
    optimizer = checkpoints / f"optimizer/policy-{DATASETS:06d}/part-00001-of-00001.safetensors"
    return {
        "latest": (checkpoints / "latest").read_text().strip(),
        "policies": [[meta.version, meta.parent, meta.dataset_sha256, meta.weights_sha256] for meta in metas],
        "optimizer": hashlib.sha256(optimizer.read_bytes()).hexdigest() if optimizer.exists() else None,
        "tokens": [
            [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts(checkpoints, name)] for name in names
        ],
        "records": [[line["version"], line["dataset"], line["loss"], line["kl"]] for line in read_records(checkpoints)],
        "temporary": [path.name for path in checkpoints.rglob(".tmp-*")],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))

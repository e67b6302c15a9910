"""A stage between the datasets of a run and its trainer, for ablations of what trainspan does.

    python -m evaluation run calculator --model scratch \
      --set loop.trainer_launch=".venv/bin/python -m evaluation.dataset_stage --hold 4" --set loop.overlap=4

The loop starts this program as the trainer's launcher: it starts the trainer on a folder of its own, `staged/`, and puts
each dataset into it, held back or with other token ids. The loop, its checks and the trainer are unchanged.
"""

import argparse
import hashlib
import json
import os
import runpy
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.ablations.retokenized import Retokenizer
from trainspan_schemas.artifacts.dataset import MANIFEST, about_dir, dataset_dirs, manifest_path, round_of

__all__ = ["Stage", "split_command"]

POLL_S = 0.1


class Stage:
    """Copies the datasets of a run, in order, from its folder `dataset` to `staged`, which the trainer follows."""

    def __init__(self, datasets: Path, *, hold: int = 0, retokenizer: Retokenizer | None = None) -> None:
        self._datasets = datasets
        self._run = datasets.parent
        self.staged = self._run / "staged"
        self._hold = hold
        self._retokenizer = retokenizer
        self.staged.mkdir(exist_ok=True)

    def run(self) -> None:
        """Copies forever; an error ends the process, because the trainer would wait forever for its next dataset."""
        try:
            while True:
                self.step()
                time.sleep(POLL_S)
        finally:
            traceback.print_exc()
            os._exit(1)

    def step(self) -> None:
        """Copies each dataset that is complete, not copied yet, and not to be held any longer."""
        for dataset in dataset_dirs(self._datasets):
            target = self.staged / dataset.name
            if target.exists() or not manifest_path(dataset).exists() or self._is_held(round_of(dataset.name) or 0):
                continue
            self._copy(dataset, target)

    def _is_held(self, round_: int) -> bool:
        """Whether rollouts of one of the `hold` rounds after this one, which the run will have, are still missing.

        Nothing is swapped while a dataset is held, so all calls of these rounds are of versions before this one.
        """
        last = min(round_ + self._hold, _rounds(self._run))
        return last > round_ and not (self._run / "sampled" / f"round-{last:04d}.json").exists()

    def _copy(self, dataset: Path, target: Path) -> None:
        """Copies a dataset so that it appears at once, with its description first."""
        partial, about = target.with_name(f".{target.name}"), target.with_name(about_dir(dataset).name)
        for leftover in (partial, about):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(about_dir(dataset), about)
        shutil.copytree(dataset, partial)
        if self._retokenizer is not None:
            manifest: dict[str, Any] = json.loads((about / MANIFEST).read_bytes())
            for file in manifest["files"]:
                part = partial / file["name"]
                self._retokenizer.rewrite(part)
                file["sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
            (about / MANIFEST).write_text(json.dumps(manifest))
        partial.rename(target)


def split_command(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this program's options, and the trainer's command after `-m trainspan_cli`."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.dataset_stage", description=__doc__)
    parser.add_argument(
        "--hold", type=int, default=0, metavar="ROUNDS", help="train a dataset only ROUNDS rounds later"
    )
    parser.add_argument("--retokenize", action="store_true", help="train the tokens of the answers' text")
    own = list(arguments[: arguments.index("-m")]) if "-m" in arguments else list(arguments)
    command = list(arguments[len(own) + 2 :])
    options = parser.parse_args(own)
    if "--dataset" not in command or "--model" not in command:
        parser.error("this is a launcher for [loop] trainer_launch: it needs the trainer's command")
    return options, command


def main(arguments: Sequence[str]) -> None:
    options, command = split_command(arguments)
    # As the trainer does it: too late once PyTorch is imported, and spinning threads slow down a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    place = command.index("--dataset") + 1
    retokenizer = Retokenizer(command[command.index("--model") + 1]) if options.retokenize else None
    stage = Stage(Path(command[place]), hold=options.hold, retokenizer=retokenizer)
    command[place] = str(stage.staged)
    threading.Thread(target=stage.run, name="dataset-stage", daemon=True).start()
    sys.argv = ["trainspan_cli", *command]
    runpy.run_module("trainspan_cli", run_name="__main__", alter_sys=True)


def _rounds(run: Path) -> int:
    settings: dict[str, Any] = json.loads((run / "run.json").read_text())["settings"]
    return int(settings["loop"]["rounds"])


if __name__ == "__main__":
    main(sys.argv[1:])

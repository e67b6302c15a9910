"""The folder `OUT.unfinished` of a job: its identity, its metrics, and the states from which it continues after a kill.

```
OUT.unfinished/job.json                 what the job is; another one is refused
OUT.unfinished/metrics.jsonl            a line for each step and evaluation
OUT.unfinished/step-000040/             weights and Adam's state after step 40
```
A state is written under a temporary name, then renamed, then the previous one is deleted.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainspan_schemas.errors import CheckpointError
from trainspan_training.metrics.round_record import METRICS_FILE, finite, read

__all__ = ["ABOUT", "JOB_FILE", "MANIFEST", "WorkFolder", "is_complete", "sync", "work_path"]

ABOUT = "sft"
"""The folder inside the finished model's with manifest and metrics; later checkpoints do not copy it."""
MANIFEST = "manifest.json"
JOB_FILE = "job.json"
_TEMPORARY = ".tmp-"
_SUFFIX = ".unfinished"


def work_path(out: Path) -> Path:
    """The folder of the unfinished job whose result will be `out`."""
    return out.with_name(out.name + _SUFFIX)


class WorkFolder:
    """This process's lock on the job's folder. Raises CheckpointError if another process or another job has it."""

    def __init__(self, out: Path, job: Mapping[str, Any]) -> None:
        self.path = work_path(out)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise CheckpointError(f"another process works on {self.path}: stop it, or give another --out") from error
        try:
            self._claim(dict(job))
        except BaseException:
            self.close()
            raise
        for leftover in self.path.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)

    def close(self) -> None:
        self._lock.close()

    def remove(self) -> None:
        """Deletes the folder: the job is complete."""
        shutil.rmtree(self.path)
        self.close()

    @property
    def metrics(self) -> Path:
        return self.path / METRICS_FILE

    def note(self, record: Mapping[str, Any]) -> None:
        """Appends a line to the metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(finite(dict(record))) + "\n")

    def latest(self) -> tuple[int, Path] | None:
        """The newest state: the step after which it was written, and its folder."""
        found = sorted(self.path.glob("step-*"))
        return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else None

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Removes the lines of later steps from the metrics: these steps are made again. Returns the others."""
        kept = [record for record in read(self.path) if record["step"] <= step]
        temporary = self.path / f".{METRICS_FILE}"
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        temporary.replace(self.metrics)
        return kept

    def begin_state(self, step: int) -> Path:
        """An empty folder for the state after a step."""
        temporary = self.path / f"{_TEMPORARY}step-{step:06d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        return temporary

    def commit_state(self, temporary: Path) -> None:
        """Makes the state the newest one and deletes those before it."""
        folder = self.path / temporary.name.removeprefix(_TEMPORARY)
        before = [path for path in self.path.glob("step-*") if path != folder]
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        temporary.rename(folder)
        sync(self.path)
        for path in before:
            shutil.rmtree(path)

    def _claim(self, job: dict[str, Any]) -> None:
        job = json.loads(json.dumps(job))
        file = self.path / JOB_FILE
        if not file.exists():
            temporary = self.path / f".{JOB_FILE}"
            temporary.write_text(json.dumps(job, indent=2) + "\n")
            temporary.replace(file)
            return
        try:
            known = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged ({error}): delete {self.path}, or give another --out") from error
        if other := _differing(known, job):
            raise CheckpointError(
                f"{self.path} holds an unfinished job with another {', '.join(other)}: run it again as before to finish it, "
                "delete the folder, or give another --out"
            )


def is_complete(out: Path, job: Mapping[str, Any]) -> bool:
    """Whether `out` is the result of this job; False if there is nothing yet. Raises CheckpointError for anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    file = out / ABOUT / MANIFEST
    try:
        known = json.loads(file.read_text())["job"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{out} exists and no `trainspan sft` wrote it: give another --out") from None
    if other := _differing(known, json.loads(json.dumps(job))):
        raise CheckpointError(
            f"{out} is the result of a job with another {', '.join(other)}: give another --out, or delete it"
        )
    return True


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys with different values; those of inner objects by their own names."""
    found = []
    for key in dict.fromkeys((*one, *other)):
        values = one.get(key), other.get(key)
        if isinstance(values[0], dict) and isinstance(values[1], dict):
            found += _differing(values[0], values[1])
        elif values[0] != values[1]:
            found.append(key)
    return found


def sync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

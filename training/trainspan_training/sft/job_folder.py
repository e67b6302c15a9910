"""The folder `OUT.unfinished` of a job: what the job is, and TRL's states (`checkpoint-N`) from which it continues after a kill."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from trainspan_schemas.errors import CheckpointError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.files.locks import try_lock

__all__ = ["ABOUT", "MANIFEST", "STATE_FILE", "JobFolder", "steps_of"]

ABOUT: Final = "sft"
"""The folder inside the finished model's with manifest and metrics; later checkpoints do not copy it."""
MANIFEST: Final = "manifest.json"
_JOB_FILE: Final = "job.json"
STATE_FILE: Final = "trainer_state.json"
"""The last file that TRL writes of a state."""


_LOWERED: Final = "max_steps"
"""The setting that may be another one when the job continues: the trainer refuses more steps than before."""


class JobFolder:
    """The folder of the job whose result will be `out`. `identity`: what determines the result; another one is refused."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out = out
        self.path = out.with_name(f"{out.name}.unfinished")
        self.identity: JsonObject = json.loads(json.dumps(identity))
        self._remembered: dict[str, int] = {}

    def finished(self) -> JsonObject | None:
        """The manifest of the result, if it is there. Raises CheckpointError if `out` is anything else."""
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return None
        try:
            manifest: JsonObject = json.loads((self.out / ABOUT / MANIFEST).read_text())
            known = manifest["job"]
        except (OSError, ValueError, KeyError, TypeError):
            raise CheckpointError(f"{self.out} exists and no `trainspan sft` wrote it: give another --out") from None
        if other := _differing(known, self.identity):
            raise CheckpointError(
                f"{self.out} is the result of a job with another {', '.join(other)}: give another --out, or delete it"
            )
        if self.path.exists():  # killed after the result was renamed
            shutil.rmtree(self.path)
        return manifest

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block the folder is this process's. Raises CheckpointError if another process or job has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            if not try_lock(lock):
                raise CheckpointError(f"another process works on {self.path}: stop it, or give another --out")
            self._claim()
            yield

    def remember(self, name: str, value: int) -> int:
        """The value that the job began with, which is this one if it has none: a continued job must not choose anew."""
        if name not in self._remembered:
            self._remembered[name] = value
            self._write()
        return self._remembered[name]

    def latest(self) -> Path | None:
        """The newest complete state."""
        states = [path.parent for path in self.path.glob(f"checkpoint-*/{STATE_FILE}") if _is_json(path)]
        return max(states, key=steps_of, default=None)

    def remove(self) -> None:
        """Deletes the folder: the job is complete, or has not begun."""
        shutil.rmtree(self.path)

    def _claim(self) -> None:
        file = self.path / _JOB_FILE
        if not file.exists():
            self._write()
            return
        try:
            job = json.loads(file.read_text())
            known, self._remembered = job["job"], job["kept"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error}): delete {self.path}, or give another --out") from error
        differing = _differing(known, self.identity)
        if other := [key for key in differing if key != _LOWERED]:
            raise CheckpointError(
                f"{self.path} holds an unfinished job with another {', '.join(other)}: run it again as before to finish it, "
                "delete the folder, or give another --out"
            )
        if differing:
            self._write()

    def _write(self) -> None:
        temporary = self.path / f".{_JOB_FILE}"
        temporary.write_text(json.dumps({"job": self.identity, "kept": self._remembered}, indent=2) + "\n")
        temporary.replace(self.path / _JOB_FILE)


def steps_of(state: Path) -> int:
    """The number of steps after which a state was saved."""
    return int(state.name.rpartition("-")[2])


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except ValueError:
        return False
    return True


def _differing(stored: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys with different values; those of inner objects by their own names."""
    keys = []
    for key in dict.fromkeys((*stored, *other)):
        values = stored.get(key), other.get(key)
        if isinstance(values[0], dict) and isinstance(values[1], dict):
            keys += _differing(values[0], values[1])
        elif values[0] != values[1]:
            keys.append(key)
    return keys

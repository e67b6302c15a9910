"""The files of a run of the loop, `$TRAINSPAN_HOME/runs/<run>/`, as readers see them; the loop writes them (run_folder.py).

`run.json` has the settings and the status, `rounds.jsonl` a line per round and evaluation, `checkpoints/metrics.jsonl` the
trainer's line per round, `dataset/` the datasets. JSON files are replaced atomically, lines are appended whole.
"""

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RunFiles", "json_lines"]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Paths and records of a run."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def datasets(self) -> Path:
        return self.path / "dataset"

    def is_held(self) -> bool:
        """Whether a live process holds the lock."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no lock, or none that can be read
            return False
        return False

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file's object; {} if it is missing."""
        try:
            value: dict[str, Any] = json.loads((self.path / name).read_text(errors="replace"))
        except FileNotFoundError:
            return {}
        return value

    def records(self) -> list[dict[str, Any]]:
        """All complete records of `rounds.jsonl`; a line cut off by a kill is skipped."""
        return json_lines(self.path / "rounds.jsonl")

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The trainer's lines of `metrics.jsonl` by round; the later one for a round that was tried twice."""
        return {line["round"]: line for line in json_lines(self.checkpoints / "metrics.jsonl")}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one per line; a line that is not complete is skipped."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records

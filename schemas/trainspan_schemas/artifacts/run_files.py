"""The files of a run of the loop, `$TRAINSPAN_HOME/runs/<run>/`, as readers see them; the loop writes them (run_folder.py).

`run.json` has the settings and the status, `rounds.jsonl` a line per round and evaluation, `checkpoints/metrics.jsonl` the
trainer's line per round, `dataset/` the datasets; with several policies each has its own folder in `checkpoints/` and in
`dataset/`. JSON files are replaced atomically, lines are appended whole.

A record has the figures of a single policy itself. With several it has those of each in `policies` (name → figures), and its
checks of a policy begin with the policy's name; see `record_of`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from trainspan_schemas.artifacts.run_records import BestRecord, RunRecord
from trainspan_schemas.files.durable import JsonObject, json_lines
from trainspan_schemas.files.locks import is_locked
from trainspan_schemas.home import policy_dir

__all__ = ["TRAINING_FILE", "RunFiles", "check_name", "record_of", "versions"]

TRAINING_FILE: Final = "training.json"
"""The last step, while a round is trained."""

_Record = TypeVar("_Record", bound=Mapping[str, Any])


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
            return is_locked(self.path / "lock")
        except OSError:  # no lock, or none that can be read
            return False

    def read(self, name: str) -> JsonObject:
        """A JSON file's object; {} if it is missing."""
        try:
            value: JsonObject = json.loads((self.path / name).read_text(errors="replace"))
        except FileNotFoundError:
            return {}
        return value

    def training(self) -> JsonObject:
        """How far the training in progress is, as a `TrainingProgress` in JSON; {} if there is none."""
        return self.read(TRAINING_FILE) if self.is_held() else {}

    def records(self) -> list[RunRecord]:
        """All complete records of `rounds.jsonl`; a line cut off by a kill is skipped."""
        return cast("list[RunRecord]", json_lines(self.path / "rounds.jsonl"))

    def best(self) -> BestRecord | None:
        """The best validation, whose checkpoint is kept; None before there is one."""
        return self.read("run.json").get("best")

    def policies(self) -> tuple[str | None, ...]:
        """The policies that the run trains."""
        return tuple(self.read("run.json").get("settings", {}).get("policies") or {}) or (None,)

    def metrics_file(self, policy: str | None = None) -> Path:
        return policy_dir(self.checkpoints, policy) / "metrics.jsonl"

    def metrics(self, policy: str | None = None) -> dict[int, JsonObject]:
        """The lines of a policy's trainer by round; the later one for a round that was tried twice."""
        return {line["round"]: line for line in json_lines(self.metrics_file(policy))}


def check_name(policy: str | None, name: str) -> str:
    """The name of a check in a record."""
    return name if policy is None else f"{policy}: {name}"


def record_of(record: _Record, policy: str | None) -> _Record:
    """The record as if its only policy were this one: with its figures and its checks."""
    if policy is None:
        return record
    prefix = check_name(policy, "")
    checks = [
        {**check, "name": check["name"].removeprefix(prefix)}
        for check in record["checks"]
        if check["name"].startswith(prefix)
    ]
    return cast("_Record", {**record, **record["policies"].get(policy, {}), "checks": checks})


def versions(record: Mapping[str, Any]) -> str:
    """The versions after a record as text, such as `3`, or `writer 3, rewriter skipped`; `–` if unknown."""
    policies = record.get("policies") or {}
    parts = [f"{name} {_version(figures)}" for name, figures in policies.items()]
    return ", ".join(parts) if policies else _version(record)


def _version(record: Mapping[str, Any]) -> str:
    version = "skipped" if record.get("skipped") else "refused" if record.get("refused") else record["policy_version"]
    return "–" if version is None else str(version)

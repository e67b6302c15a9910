"""`$TRAINSPAN_HOME/runs/<run>/`: the state of one run on disk, from which it resumes after any kill."""

import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from trainspan_loop.state.task_pool import TaskPool
from trainspan_schemas.artifacts.checkpoint import write_latest
from trainspan_schemas.artifacts.dataset import dataset_dirs, round_of
from trainspan_schemas.artifacts.run_files import TRAINING_FILE, RunFiles
from trainspan_schemas.artifacts.run_records import BestRecord, EvalRecord, RunRecord, rounds_in
from trainspan_schemas.command_events import TrainingProgress
from trainspan_schemas.errors import ProcessError, UsageError
from trainspan_schemas.files.durable import JsonObject, append_line, json_lines, sync
from trainspan_schemas.files.locks import try_lock
from trainspan_schemas.home import make_home, policy_dir, runs_dir
from trainspan_training.checkpoints.ledger import CONSUMING

__all__ = ["ADDRESSES", "DamagedRunError", "RunFolder", "is_same_run", "newest_unfinished", "runs_named"]

_log = logging.getLogger(__name__)

ADDRESSES: Final = frozenset(
    {
        *(("ports", "base"), ("serving", "host"), ("serving", "port"), ("serving", "collector")),
        *(("collector", "grpc"), ("collector", "http"), ("collector", "flight"), ("collector", "endpoints")),
        *(("rollouts", "policy_url"), ("rollouts", "collector"), ("train", "policy_url"), ("view", "port")),
    }
)
"""Settings, as (section, key), that say where processes listen: a run may go on elsewhere."""
_RESUMED_WITH: Final = ADDRESSES | {("loop", "rounds")}
"""Settings that may be others when a run is resumed."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,63}")
_TIME: Final = len("20261120-101500-")

_READER_S = 1.0
"""A process that checks whether the run is active holds the lock briefly."""
LEDGER_REST_S = 20.0
"""A running trainer writes a round's metrics well within this time after the ledger's last line of that round."""


class DamagedRunError(ProcessError):
    """A file of a run cannot be read."""


@dataclass(frozen=True, slots=True)
class RunFolder(RunFiles):
    """Paths and records of a run; files are replaced atomically or appended in whole lines."""

    @classmethod
    def create(cls, settings: Mapping[str, Any], name: str | None = None) -> "RunFolder":
        """Creates a new run; its id is the time, so that ids sort by age, and the name. Raises UsageError for no such name."""
        if name is not None and not _NAME.fullmatch(name):
            raise UsageError(
                f"--name {name[:80]!r}: use up to 64 letters, digits and . _ = -, the first a letter or digit"
            )
        run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name or uuid.uuid4().hex[:8]}"
        folder = cls(runs_dir() / run_id)
        make_home()
        folder.path.mkdir(parents=True)
        folder.write("run.json", {"run_id": run_id, "status": "running", "settings": settings})
        return folder

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the run for this process. Raises ProcessError if another one holds the lock."""
        with (self.path / "lock").open("w") as file:
            if not try_lock(file, wait_s=_READER_S):
                raise ProcessError(f"run {self.run_id} is in progress in another `trainspan loop`")
            yield

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Replaces a JSON file atomically, and durably: after a power loss it is the old one or the new one."""
        path = self.path / name
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)

    def read(self, name: str) -> JsonObject:
        """A JSON file's object; {} if it is missing. Raises DamagedRunError if it is damaged, as by a power loss."""
        try:
            return RunFiles.read(self, name)
        except json.JSONDecodeError as error:
            raise DamagedRunError(
                f"{self.path / name} is damaged: put back a copy of it, or begin another run"
            ) from error

    def read_whole(self, name: str) -> JsonObject:
        """The same, but {} for a damaged file, which is logged: for what begins anew without it."""
        try:
            return self.read(name)
        except DamagedRunError as error:
            _log.warning("event=run_file_damaged %s", error)
            return {}

    def append(self, record: RunRecord) -> None:
        """Appends a record to `rounds.jsonl`."""
        append_line(self.path / "rounds.jsonl", json.dumps(record, default=str))

    def used(self, dataset_sha256: str, policy: str | None = None) -> str | None:
        """The newest event by which a policy's trainer used up a dataset; None if a trainer that starts trains it."""
        entries = json_lines(policy_dir(self.checkpoints, policy) / "ledger.jsonl")
        events = [entry["event"] for entry in entries if entry.get("dataset") == dataset_sha256]
        return next((event for event in reversed(events) if event in CONSUMING), None)

    def trained_before(self, dataset_sha256: str, policy: str | None = None) -> JsonObject | None:
        """The record of a policy's trainer of a finished dataset: from its metrics, else from its ledger.

        The ledger is written first. It is used without metrics only after 20 s without a write: the trainer was then killed.
        Metrics of an attempt that did not use up the dataset do not count. None after a checkpoint is published, too: a trainer
        that starts after a kill repeats its round, and then has metrics or says that they are lost.
        """
        if (used := self.used(dataset_sha256, policy)) is None:
            return None
        has_failed = used in ("aborted", "refused")
        lines = [line for line in json_lines(self.metrics_file(policy)) if line.get("dataset") == dataset_sha256]
        for line in reversed(lines) if has_failed else lines:
            if has_failed or not line.get("error"):
                return line
        ledger = policy_dir(self.checkpoints, policy) / "ledger.jsonl"
        # A clock that was set back makes the last write lie in the future.
        if abs(time.time() - ledger.stat().st_mtime) < LEDGER_REST_S:
            return None
        for entry in json_lines(ledger):
            if entry.get("dataset") != dataset_sha256:
                continue
            reason = entry.get("reason") or f"{entry['event']}, then interrupted before its metrics"
            if entry.get("event") in ("skipped", "withdrawn"):
                return {"skipped": reason}
            if entry.get("event") in ("aborted", "refused"):
                return {"error": reason}
        return None

    def is_withdrawn(self, checkpoint: str | None, policy: str | None = None) -> bool:
        """Whether an earlier checkpoint of a policy was put back in service instead of this one."""
        entries = json_lines(policy_dir(self.checkpoints, policy) / "ledger.jsonl")
        last = [entry["event"] for entry in entries if checkpoint and entry.get("checkpoint") == checkpoint][-1:]
        return last == ["withdrawn"]

    def last_begun(self) -> int:
        """The last round that is on record, or of which a trainer has a dataset."""
        rounds = [record["round"] for record in rounds_in(self.records())]
        for policy in self.policies():
            rounds += [round_of(path.name) or 0 for path in dataset_dirs(policy_dir(self.datasets, policy))]
        return max(rounds, default=0)

    def keep_sampled(self, round_: int, collected: Mapping[str, Any]) -> None:
        """Keeps the figures of a round's rollouts, so that a loop that was killed does not repeat them."""
        (self.path / "sampled").mkdir(exist_ok=True)
        self.write(_sampled_name(round_), collected)

    def sampled(self, round_: int) -> JsonObject | None:
        """What `keep_sampled` kept."""
        return self.read(_sampled_name(round_)) or None

    def keep_best(self, checkpoints: Mapping[str | None, str], record: EvalRecord) -> None:
        """Keeps checkpoints (policy → name) in `best/` in place of the earlier best, as hard links, which survive pruning.

        A single policy's is `best/<name>`. Several are a folder of checkpoints to serve from, `best/round-<number>`.
        """
        best = self.path / "best"
        alone = checkpoints.get(None)
        target = best / (alone or f"round-{record['round']:04d}")
        best.mkdir(exist_ok=True)
        if not target.exists():
            temporary = best / f".{target.name}"
            shutil.rmtree(temporary, ignore_errors=True)
            for policy, name in checkpoints.items():
                copy = temporary / policy / name if policy is not None else temporary
                shutil.copytree(policy_dir(self.checkpoints, policy) / name, copy, copy_function=os.link)
                if policy is not None:
                    write_latest(copy.parent, name)
            temporary.rename(target)
        best_record: BestRecord = {
            "checkpoint": str(target),
            "round": record["round"],
            "policy_version": record["policy_version"],
            "n": record["n"],
            "mean": record["mean"],
            "deviation": record["deviation"],
            "binary": record["binary"],
        }
        self.write("run.json", {**self.read("run.json"), "best": best_record})
        for other in best.iterdir():
            if other != target:
                shutil.rmtree(other)

    def begin_run(self, rounds: int) -> None:
        """Records the number of rounds, which may be another one when the run is resumed, and that no training is in progress."""
        self.note_training(None)
        run = self.read("run.json")
        run["settings"]["loop"]["rounds"] = rounds
        self.write("run.json", run)

    def note_training(self, progress: TrainingProgress | None) -> None:
        """Shows other processes how far the training is; None: it has ended."""
        if progress is None:
            (self.path / TRAINING_FILE).unlink(missing_ok=True)
        else:
            self.write(TRAINING_FILE, asdict(progress))

    def finish(self, status: str, **more: Any) -> None:
        self.write("run.json", {**self.read("run.json"), "status": status, **more})

    def draw_tasks(self, name: str, tasks: TaskPool, count: int, seed: str) -> Path:
        """Writes a task file with `count` of the tasks (all, if fewer), drawn by `seed`; the same on every call."""
        path = self.path / "tasks" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(line + "\n" for line in tasks.draw(count, seed)))
        return path


def newest_unfinished(settings: Mapping[str, Any], name: str | None = None) -> RunFolder | None:
    """The newest run (of this name), if it is unfinished and has the same settings, but for addresses and number of rounds."""
    folders = runs_named(name)
    if not folders:
        return None
    run = folders[-1].read_whole("run.json")
    is_unfinished = run.get("status") == "running" and is_same_run(settings, run.get("settings", {}))
    return folders[-1] if is_unfinished else None


def runs_named(name: str | None) -> list[RunFolder]:
    """All runs with this name, or all; the newest last."""
    folders = sorted(path.parent for path in runs_dir().glob("*/run.json"))
    return [RunFolder(folder) for folder in folders if name in (None, folder.name[_TIME:])]


def is_same_run(settings: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether a run with the settings `known`, as read from JSON, can go on with these."""
    return _of_the_run(json.loads(json.dumps(settings, default=str))) == _of_the_run(known)


def _of_the_run(settings: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    values = {
        (section, key): value
        for section, table in settings.items()
        for key, value in (table.items() if isinstance(table, dict) else [("", table)])
    }
    return {key: value for key, value in values.items() if key not in _RESUMED_WITH}


def _sampled_name(round_: int) -> str:
    return f"sampled/round-{round_:04d}.json"

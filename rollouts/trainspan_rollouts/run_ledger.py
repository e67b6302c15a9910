"""What of a run is done: a file of JSON lines per run, round and split, by which an interrupted run is resumed.

A rollout counts as finished once the collector has acknowledged its span, or, while the collector is away, once the span
is written here: a resumed run sends it, and repeats only what a kill kept from both. A rollout that had begun goes on as
its next attempt.
"""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from trainspan_schemas.errors import UsageError
from trainspan_schemas.home import home
from trainspan_schemas.identity import Identity, Split
from trainspan_schemas.status import RolloutStatus

__all__ = ["Begun", "Finished", "RunLedger", "ledger_file", "recorded_rewards", "task_rewards"]

_AGAIN: Final = frozenset({"infra_error", "cancelled"})
"""How a rollout ends that a resumed run tries again."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A rollout that an earlier life of the run has begun and not finished."""

    rollout_id: str
    attempt: int
    """Its last."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a rollout ended in an earlier life of the run."""

    status: RolloutStatus
    reward: float | None


def ledger_file(run_id: str, round_: int, split: Split | None) -> Path:
    """Where the ledger lies: `$TRAINSPAN_HOME/rollouts/{run}/round-NNNN[-split].jsonl`."""
    name = f"round-{round_:04d}{f'-{split}' if split else ''}.jsonl"
    return home() / "rollouts" / "".join(c if c.isalnum() or c in "-_." else "_" for c in run_id).lstrip(".") / name


def recorded_rewards(file: Path) -> dict[tuple[str, int], float]:
    """(rollout id, attempt) → reward, of the finished rollouts of a ledger file that have one; none where there is no file."""
    begun: dict[str, tuple[str, int]] = {}
    found: dict[tuple[str, int], float] = {}
    for record in _records(file):
        if "begin" in record:
            begun[record["begin"]] = record["rollout"], record["attempt"]
        elif "end" in record and record["reward"] is not None:
            found[begun[record["end"]]] = record["reward"]
    return found


def task_rewards(file: Path) -> dict[str, list[float]]:
    """Task id → the rewards of its finished rollouts that have one; none where there is no file."""
    found: dict[str, list[float]] = {}
    for record in _records(file):
        if "end" in record and record["reward"] is not None:
            _, _, task_id = record["end"].partition(":")
            found.setdefault(task_id, []).append(record["reward"])
    return found


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a ledger file after its first."""
    for line in file.read_bytes().splitlines(keepends=True)[1:] if file.exists() else []:
        if not line.endswith(b"\n"):
            return  # it is being written, or a kill cut it off
        yield json.loads(line)


class RunLedger:
    """Appends as rollouts begin and are delivered; thread-safe."""

    def __init__(self, file: Path, tasks: Path, target: Iterable[str], *, resume: bool) -> None:
        """Starts the file anew, or with `resume` goes on with it.

        Raises UsageError where there is nothing to resume, or the run was of another task file or target.
        """
        self._lock = threading.Lock()
        self._ended: dict[tuple[str, int], tuple[str, RolloutStatus, float | None]] = {}
        self._begun: dict[str, Begun] = {}
        self._finished: dict[str, Finished] = {}
        self._waiting: dict[tuple[str, int], dict[str, Any]] = {}
        """Spans in this file that the collector has not acknowledged."""
        head = {"tasks": str(tasks.resolve()), "target": list(target)}
        if resume:
            self._read(file, head)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = file.open("ab" if resume else "wb", buffering=0)
        if not resume:
            self._write(head)

    def finished(self, task_id: str, number: int) -> Finished | None:
        """How the rollout with this number (from 0) of a task ended, None where it is still to be done."""
        return self._finished.get(_key(task_id, number))

    def begun(self, task_id: str, number: int) -> Begun | None:
        return self._begun.get(_key(task_id, number))

    def begin(self, identity: Identity, number: int) -> None:
        """An attempt begins."""
        key = _key(identity.task_id or "", number)
        self._write({"begin": key, "rollout": identity.rollout_id, "attempt": identity.attempt})

    def end(self, identity: Identity, number: int, status: RolloutStatus, reward: float | None) -> None:
        """An attempt has ended; it is written once `delivered` says that its span has arrived."""
        with self._lock:
            key = _key(identity.task_id or "", number)
            self._ended[identity.rollout_id, identity.attempt] = (key, status, reward)

    def undelivered(self) -> list[dict[str, Any]]:
        """The spans that earlier lives of the run wrote down and the collector has not acknowledged."""
        return list(self._waiting.values())

    def delivered(self, rollout_id: str, attempt: int) -> None:
        """The collector has acknowledged the span of this attempt."""
        if not self._end(rollout_id, attempt, {}):
            self._write({"delivered": rollout_id, "attempt": attempt})

    def waits(self, rollout_id: str, attempt: int, span: dict[str, Any]) -> None:
        """The collector is away: the span of this attempt is kept here."""
        self._end(rollout_id, attempt, {"span": span})

    def _end(self, rollout_id: str, attempt: int, more: dict[str, Any]) -> bool:
        """Notes the end of an attempt, once; whether this was the first time."""
        with self._lock:
            ended = self._ended.pop((rollout_id, attempt), None)
        if ended is not None:
            key, status, reward = ended
            which = {"rollout": rollout_id, "attempt": attempt}
            self._write({"end": key, **which, "status": status, "reward": reward, **more})
        return ended is not None

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")

    def _read(self, file: Path, head: dict[str, Any]) -> None:
        try:
            data = file.read_bytes()
        except FileNotFoundError as error:
            raise UsageError(f"nothing to resume: there is no {file}; run without --resume first") from error
        whole = data.rfind(b"\n") + 1
        if whole != len(data):  # a line that a kill cut off
            os.truncate(file, whole)
        first, *lines = data[:whole].splitlines() or [b"null"]
        if (found := json.loads(first)) != head:
            raise UsageError(f"cannot resume {file}: it is of {found}, not of {head}")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        if "begin" in record:
            self._begun[record["begin"]] = Begun(record["rollout"], record["attempt"])
            return
        if "delivered" in record:
            self._waiting.pop((record["delivered"], record["attempt"]), None)
            return
        if "span" in record:
            self._waiting[record["rollout"], record["attempt"]] = record["span"]
        if record["status"] not in _AGAIN:
            self._finished[record["end"]] = Finished(record["status"], record["reward"])
            self._begun.pop(record["end"], None)


def _key(task_id: str, number: int) -> str:
    return f"{number}:{task_id}"

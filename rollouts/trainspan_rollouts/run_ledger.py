"""Records the progress of a run, one file of JSON lines per run, round and split, to resume an interrupted run.

A rollout counts as finished once the collector has acknowledged its span, or, while the collector is unreachable, once
the span is written here. A resumed run sends such spans, and repeats only rollouts for which neither happened before a
kill. An unfinished rollout continues with its next attempt.
"""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from trainspan_rollouts.task_stream import STDIN
from trainspan_schemas.errors import UsageError
from trainspan_schemas.home import home
from trainspan_schemas.telemetry.identity import Identity, Split
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = [
    "Begun",
    "Finished",
    "RunLedger",
    "ledger_file",
    "ledger_files",
    "points_file",
    "recorded_rewards",
    "recorded_target",
    "task_rewards",
]

_AGAIN: Final = frozenset({"infra_error", "cancelled"})
"""Final statuses that a resumed run retries."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A rollout that an earlier process of the run started but did not finish."""

    rollout_id: str
    attempt: int
    """The latest attempt."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a rollout in an earlier process of the run."""

    status: RolloutStatus
    reward: float | None


def ledger_file(run_id: str, round_: int, split: Split | None, *, of_branches: bool = False) -> Path:
    """Returns the path of the ledger: `$TRAINSPAN_HOME/rollouts/{run}/[branches-]round-NNNN[-split].jsonl`."""
    prefix = "branches-" if of_branches else ""
    return _folder(run_id) / f"{prefix}round-{round_:04d}{f'-{split}' if split else ''}.jsonl"


def ledger_files(run_id: str, split: Split) -> list[Path]:
    """Returns the paths of all ledgers of the run and split."""
    return sorted(_folder(run_id).glob(f"round-*-{split}.jsonl"))


def _folder(run_id: str) -> Path:
    return home() / "rollouts" / "".join(c if c.isalnum() or c in "-_." else "_" for c in run_id).lstrip(".")


def points_file(run_id: str, round_: int) -> Path:
    """Returns the path of a run's branch points: `$TRAINSPAN_HOME/rollouts/{run}/branch-points-NNNN.jsonl`."""
    return _folder(run_id) / f"branch-points-{round_:04d}.jsonl"


def recorded_target(run_id: str, round_: int, split: Split | None) -> tuple[str, tuple[str, ...]] | None:
    """Returns task file (`-`: standard input) and target of a run's rollouts of a round; None if they are not recorded."""
    for file in (ledger_file(run_id, round_, split), ledger_file(run_id, round_, None)):
        if file.is_file():
            with file.open("rb") as lines:
                head = json.loads(lines.readline() or b"null")
            return None if head is None else (head["tasks"], tuple(head["target"]))
    return None


def recorded_rewards(file: Path) -> dict[tuple[str, int], float]:
    """Returns (rollout id, attempt) → reward for the finished, rewarded rollouts in a ledger; empty without a file."""
    begun: dict[str, tuple[str, int]] = {}
    found: dict[tuple[str, int], float] = {}
    for record in _records(file):
        if "begin" in record:
            begun[record["begin"]] = record["rollout"], record["attempt"]
        elif "end" in record and record["reward"] is not None:
            found[begun[record["end"]]] = record["reward"]
    return found


def task_rewards(file: Path) -> dict[str, list[float]]:
    """Returns task id → rewards of its finished, rewarded rollouts in a ledger; empty without a file."""
    found: dict[str, list[float]] = {}
    for record in _records(file):
        if "end" in record and record["reward"] is not None:
            _, _, task_id = record["end"].partition(":")
            found.setdefault(task_id, []).append(record["reward"])
    return found


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a ledger file after the first."""
    for line in file.read_bytes().splitlines(keepends=True)[1:] if file.exists() else []:
        if not line.endswith(b"\n"):
            return  # it is being written, or was cut off by a kill
        yield json.loads(line)


class RunLedger:
    """Appends a line as each rollout starts and is delivered; thread-safe."""

    def __init__(self, file: Path, round_: int, tasks: Path, target: Iterable[str], *, resume: bool) -> None:
        """Starts a new file, or with `resume` continues the existing one.

        Raises UsageError if there is nothing to resume, or if the run had another task file or target.
        """
        self._lock = threading.Lock()
        self._round = round_
        self._ended: dict[tuple[str, int], tuple[str, RolloutStatus, float | None]] = {}
        self._begun: dict[str, Begun] = {}
        self._finished: dict[str, Finished] = {}
        self._waiting: dict[tuple[str, int], dict[str, Any]] = {}
        """Spans in this file that the collector has not acknowledged."""
        head = {"tasks": "-" if tasks == STDIN else str(tasks.resolve()), "target": list(target)}
        if resume:
            self._read(file, head)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = file.open("ab" if resume else "wb", buffering=0)
        if not resume:
            self._write(head)

    def finished(self, round_: int, task_id: str, number: int) -> Finished | None:
        """Returns the outcome of a task's rollout `number` (from 0), None if it is not finished."""
        return self._finished.get(self._key(round_, task_id, number))

    def begun(self, round_: int, task_id: str, number: int) -> Begun | None:
        return self._begun.get(self._key(round_, task_id, number))

    def begin(self, identity: Identity, number: int) -> None:
        """Records the start of an attempt."""
        key = self._key(identity.round, identity.task_id or "", number)
        self._write({"begin": key, "rollout": identity.rollout_id, "attempt": identity.attempt})

    def end(self, identity: Identity, number: int, status: RolloutStatus, reward: float | None) -> None:
        """Remembers the end of an attempt; `delivered` or `waits` writes it."""
        with self._lock:
            key = self._key(identity.round, identity.task_id or "", number)
            self._ended[identity.rollout_id, identity.attempt] = (key, status, reward)

    def undelivered(self) -> list[dict[str, Any]]:
        """Returns the spans recorded by earlier processes of the run that the collector has not acknowledged."""
        return list(self._waiting.values())

    def delivered(self, rollout_id: str, attempt: int) -> None:
        """Records that the collector has acknowledged the span of this attempt."""
        if not self._end(rollout_id, attempt, {}):
            self._write({"delivered": rollout_id, "attempt": attempt})

    def waits(self, rollout_id: str, attempt: int, span: dict[str, Any]) -> None:
        """Records the span of this attempt while the collector is unreachable."""
        self._end(rollout_id, attempt, {"span": span})

    def _end(self, rollout_id: str, attempt: int, more: dict[str, Any]) -> bool:
        """Records the end of an attempt once; returns whether this call did."""
        with self._lock:
            ended = self._ended.pop((rollout_id, attempt), None)
        if ended is not None:
            key, status, reward = ended
            which = {"rollout": rollout_id, "attempt": attempt}
            self._write({"end": key, **which, "status": status, "reward": reward, **more})
        return ended is not None

    def close(self) -> None:
        self._file.close()

    def _key(self, round_: int | None, task_id: str, number: int) -> str:
        """Names the round only if it is not the ledger's own: tasks on standard input have rounds of their own."""
        return f"{number}:{task_id}" if round_ == self._round else f"{number}@{round_}:{task_id}"

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")

    def _read(self, file: Path, head: dict[str, Any]) -> None:
        try:
            data = file.read_bytes()
        except FileNotFoundError as error:
            raise UsageError(f"nothing to resume: {file} does not exist; run without --resume first") from error
        whole = data.rfind(b"\n") + 1
        if whole != len(data):  # a line cut off by a kill
            os.truncate(file, whole)
        first, *lines = data[:whole].splitlines() or [b"null"]
        if (found := json.loads(first)) != head:
            raise UsageError(f"cannot resume {file}: it is for {found}, not {head}")
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

"""Records the progress of a run, one file of JSON lines per run, round, split and shard, to resume an interrupted run.

A rollout counts as finished once the collector has acknowledged its span, or, while the collector is unreachable, once
the span is written here. A resumed run sends such spans, and repeats only rollouts for which neither happened before a
kill. An unfinished rollout continues with its next attempt.
"""

import json
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from trainspan_rollouts.ledger.lines import Begin, End, Finished, Line, head_of, note_waiting, whole_lines
from trainspan_rollouts.ledger.paths import ledger_file, ledger_files, shard_of
from trainspan_rollouts.records import RunSettings
from trainspan_rollouts.task_stream import STDIN
from trainspan_schemas.command_events import REPEATED
from trainspan_schemas.errors import UsageError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.files.locks import try_lock
from trainspan_schemas.telemetry.identity import Identity
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["Begun", "RunLedger", "open_ledger"]

_ENDING_S: Final = 15.0
"""How long a resumed run waits for the runner before it, which a kill of the loop has told to end its agents."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A rollout that an earlier process of the run started."""

    rollout_id: str
    attempt: int
    """The latest attempt."""
    task: str
    """Digest of its task."""


def open_ledger(settings: RunSettings, judge_digest: str | None) -> "RunLedger":
    """Opens the ledger of a run's process, with the digest of its judge. A shard that has not begun is resumed from nothing.

    Raises UsageError as `RunLedger` does, and if the round was begun with another number of shards.
    """
    run_id, round_, split, shard = settings.run_id, settings.round, settings.split, settings.shard
    of_branches = settings.branches is not None
    for other in ledger_files(run_id, round_, split, of_branches=of_branches):
        if (count := shard_of(other).count) != shard.count:
            raise UsageError(
                f"run {run_id}, round {round_} was begun with {count} shards, not {shard.count}: each task belongs to "
                f"one shard; choose another --run, or delete {other.parent}"
            )
    file = ledger_file(run_id, round_, split, shard, of_branches=of_branches)
    resume = settings.resume and (shard.count == 1 or file.exists())
    judge = None if settings.judge is None or judge_digest is None else (settings.judge, judge_digest)
    agent = {"harness": settings.harness, "workspace": settings.workspace}
    return RunLedger(file, round_, settings.tasks, settings.target, settings.n, resume=resume, judge=judge, **agent)


class RunLedger:
    """Appends a line as each rollout starts and is delivered; thread-safe."""

    def __init__(
        self,
        file: Path,
        round_: int,
        tasks: Path,
        target: Iterable[str],
        n: int,
        *,
        resume: bool,
        judge: tuple[str, str] | None = None,
        harness: str | None = None,
        workspace: str | None = None,
    ) -> None:
        """Starts a new file, or with `resume` continues the existing one. `n` is the rollouts per task, `judge` its name and digest.

        Raises UsageError if there is nothing to resume, if the run had another task file, agent, `n` or judge (its verdicts would be
        compared with this one's), or if another process has the ledger open.
        """
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._round = round_
        self._ended: dict[tuple[str, int], tuple[str, RolloutStatus, float | None]] = {}
        self._begun: dict[str, Begun] = {}
        self._finished: dict[str, Finished] = {}
        self._waiting: dict[tuple[str, int], JsonObject] = {}
        """Spans in this file that the collector has not acknowledged."""
        head: JsonObject = {"tasks": "-" if tasks == STDIN else str(tasks.resolve()), "target": list(target), "n": n}
        head |= {name: value for name, value in (("harness", harness), ("workspace", workspace)) if value}
        if judge is not None:
            head |= {"judge": judge[0], "judge_sha256": judge[1]}
        if resume and not file.exists():
            raise UsageError(f"nothing to resume: {file} does not exist; run without --resume first")
        file.parent.mkdir(parents=True, exist_ok=True)
        # For its owner alone: who knows an attempt's trace can send rewards in it.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "ab", buffering=0)
        self._hold(file, wait_s=_ENDING_S if resume else 0.0)
        if resume:
            self._read(file, head)
        else:
            self._file.truncate(0)
            self._write(head)

    def finished(self, round_: int, task_id: str, number: int) -> Finished | None:
        """Returns the outcome of a task's rollout `number` (from 0), None if it is not finished."""
        return self._finished.get(self._key(round_, task_id, number))

    def begun(self, round_: int, task_id: str, number: int) -> Begun | None:
        return self._begun.get(self._key(round_, task_id, number))

    def record_start(self, identity: Identity, number: int, task: str, span: JsonObject | None = None) -> None:
        """Records the start of an attempt, with the digest of its task.

        A later process sends the `span` if this one is killed before the attempt ends.
        """
        which = {"rollout": identity.rollout_id, "attempt": identity.attempt, "task": task}
        self._write({"begin": self._key(identity.round, identity.task_id or "", number), **which, "span": span})

    def record_end(self, identity: Identity, number: int, status: RolloutStatus, reward: float | None) -> None:
        """Remembers the end of an attempt; `delivered` or `waits` writes it."""
        with self._lock:
            key = self._key(identity.round, identity.task_id or "", number)
            self._ended[identity.rollout_id, identity.attempt] = (key, status, reward)

    def undelivered(self) -> list[JsonObject]:
        """Returns the spans of earlier processes of the run that the collector has not acknowledged, killed attempts' included."""
        return list(self._waiting.values())

    def delivered(self, rollout_id: str, attempt: int) -> None:
        """Records that the collector has acknowledged the span of this attempt."""
        if not self._end(rollout_id, attempt, None):
            self._write({"delivered": rollout_id, "attempt": attempt})

    def waits(self, rollout_id: str, attempt: int, span: JsonObject) -> None:
        """Records the span of this attempt while the collector is unreachable."""
        self._end(rollout_id, attempt, span)

    def _end(self, rollout_id: str, attempt: int, span: JsonObject | None) -> bool:
        """Records the end of an attempt once; returns whether this call did."""
        with self._lock:
            ended = self._ended.get((rollout_id, attempt))
        if ended is None:
            return False
        key, status, reward = ended
        which = {"rollout": rollout_id, "attempt": attempt}
        waiting = {} if span is None else {"span": span}
        self._write({"end": key, **which, "status": status, "reward": reward, **waiting})
        with self._lock:
            del self._ended[rollout_id, attempt]
        return True

    def close(self) -> None:
        self._file.close()

    def _key(self, round_: int | None, task_id: str, number: int) -> str:
        """Names the round only if it is not the ledger's own: tasks on standard input have rounds of their own."""
        return f"{number}:{task_id}" if round_ == self._round else f"{number}@{round_}:{task_id}"

    def _write(self, record: JsonObject) -> None:
        """Raises OSError if the disk is full; no part of the line is then left."""
        line = json.dumps(record).encode() + b"\n"
        with self._writing:
            end = os.fstat(self._file.fileno()).st_size
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                os.truncate(self._file.fileno(), end)
                raise

    def _hold(self, file: Path, wait_s: float) -> None:
        """Locks the file until it is closed. Raises UsageError if another process still holds the lock after `wait_s`."""
        with suppress(OSError):  # a file system without locks
            if not try_lock(self._file, wait_s=wait_s):
                raise UsageError(f"{file} is in use: another process runs these rollouts; end it first")

    def _read(self, file: Path, head: JsonObject) -> None:
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        os.truncate(file, whole)  # without a line cut off by a kill
        first, *lines = data[:whole].splitlines(keepends=True) or [b""]
        if (stored := head_of(file, first)) is None:  # the process before could not write it
            if lines:  # rollouts that were made would be made again, and compared with the earlier ones
                raise UsageError(f"cannot resume {file}: its first line is damaged; begin another run")
            self._file.truncate(0)
            self._write(head)
            return
        if changed := [name for name in (*head, *stored) if head.get(name) != stored.get(name)]:
            name = changed[0]
            raise UsageError(
                f"cannot resume {file}: its {name} is {stored.get(name)}, not {head.get(name)}; undo the change, or begin another "
                "run (another --run; a loop: without --resume): its rollouts in the store would be compared with the new ones"
            )
        for line in whole_lines(file, lines):
            self._resume(line)

    def _resume(self, line: Line) -> None:
        note_waiting(self._waiting, line)
        if isinstance(line, Begin):
            self._begun[line.key] = Begun(line.rollout_id, line.attempt, line.task)
            self._finished.pop(line.key, None)  # of an earlier attempt: a group that is compared is repeated whole
        if not isinstance(line, End):
            return
        if line.outcome.status not in REPEATED:
            self._finished[line.key] = line.outcome

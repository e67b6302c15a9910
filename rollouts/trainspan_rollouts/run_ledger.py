"""Records the progress of a run, one file of JSON lines per run, round, split and shard, to resume an interrupted run.

A rollout counts as finished once the collector has acknowledged its span, or, while the collector is unreachable, once
the span is written here. A resumed run sends such spans, and repeats only rollouts for which neither happened before a
kill. An unfinished rollout continues with its next attempt.
"""

import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeAlias
from urllib.parse import quote

from trainspan_rollouts.records import RunSettings, Shard
from trainspan_rollouts.task_stream import STDIN
from trainspan_schemas.command_events import REPEATED
from trainspan_schemas.errors import UsageError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.files.locks import try_lock
from trainspan_schemas.home import home
from trainspan_schemas.telemetry.identity import Identity, Split
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = [
    "Begun",
    "Finished",
    "RecordedAgent",
    "RunLedger",
    "ledger_file",
    "ledger_files",
    "newest_ledgers",
    "open_ledger",
    "points_file",
    "recorded_agent",
    "recorded_rewards",
    "round_of",
    "run_folder",
    "shard_of",
    "statuses",
    "task_outcomes",
    "waiting_rounds",
]

_log = logging.getLogger(__name__)

_ENDING_S: Final = 15.0
"""How long a resumed run waits for the runner before it, which a kill of the loop has told to end its agents."""
_SHARD: Final = re.compile(r"\.shard-(\d+)-of-(\d+)$")

_ROUND: Final = re.compile(r"(?:branches-)?round-(\d+)")


@dataclass(frozen=True, slots=True)
class Begun:
    """A rollout that an earlier process of the run started."""

    rollout_id: str
    attempt: int
    """The latest attempt."""


@dataclass(frozen=True, slots=True)
class RecordedAgent:
    """What a run's rollouts execute."""

    target: tuple[str, ...]
    harness: str | None = None
    workspace: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a rollout in an earlier process of the run."""

    status: RolloutStatus
    reward: float | None

    @property
    def unrewarded(self) -> str:
        """Why it has no reward: its status, or `no_reward` if it is ok."""
        return "no_reward" if self.status == "ok" else self.status


@dataclass(frozen=True, slots=True)
class _Begin:
    """A line of a rollout's attempt that began; `key` names its task and number (see `RunLedger`)."""

    key: str
    rollout_id: str
    attempt: int
    span: JsonObject | None
    """Stands for the attempt if no end follows."""


@dataclass(frozen=True, slots=True)
class _End:
    """A line of an attempt that ended; with its span, if the collector has not acknowledged it."""

    key: str
    rollout_id: str
    attempt: int
    outcome: Finished
    span: JsonObject | None


@dataclass(frozen=True, slots=True)
class _Delivered:
    """A line of an attempt whose span the collector has acknowledged since."""

    rollout_id: str
    attempt: int


_Line: TypeAlias = _Begin | _End | _Delivered


def ledger_file(run_id: str, round_: int, split: Split | None, shard: Shard, *, of_branches: bool = False) -> Path:
    """Returns the path of the ledger.

    It is `$TRAINSPAN_HOME/rollouts/{run}/[branches-]round-NNNN[-split][.shard-iiii-of-nnnn].jsonl`.
    """
    part = f".shard-{shard.index:04d}-of-{shard.count:04d}" if shard.count > 1 else ""
    return run_folder(run_id) / f"{_stem(f'{round_:04d}', split, of_branches=of_branches)}{part}.jsonl"


def ledger_files(run_id: str, round_: int | None, split: Split | None, *, of_branches: bool = False) -> list[Path]:
    """Returns the paths of the existing ledgers of a run, round (None: all) and split: one, or one for each shard."""
    stem = _stem("*" if round_ is None else f"{round_:04d}", split, of_branches=of_branches)
    return sorted(path for end in (".jsonl", ".shard-*.jsonl") for path in run_folder(run_id).glob(stem + end))


def waiting_rounds(run_id: str, split: Split | None) -> list[int]:
    """Returns the rounds of a run and split whose ledgers have spans that the collector has not acknowledged."""
    rounds = set()
    for file in ledger_files(run_id, None, split):
        waiting: dict[tuple[str, int], JsonObject] = {}
        for line in _lines(file):
            _wait_or_not(waiting, line)
        if waiting:
            rounds.add(round_of(file))
    return sorted(rounds)


def _wait_or_not(waiting: dict[tuple[str, int], JsonObject], line: _Line) -> None:
    """Notes the span of an attempt that a line says is not delivered yet, or takes it out."""
    span = None if isinstance(line, _Delivered) else line.span
    if span is None:
        waiting.pop((line.rollout_id, line.attempt), None)
    else:
        waiting[line.rollout_id, line.attempt] = span


def newest_ledgers() -> list[Path]:
    """Returns the ledgers of the run, round and split that was written last, one for each shard; empty if there is none."""
    ledgers = (file for prefix in ("", "branches-") for file in (home() / "rollouts").glob(f"*/{prefix}round-*.jsonl"))
    newest = max(ledgers, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return []
    stem = _SHARD.sub("", newest.stem)
    return sorted(file for file in newest.parent.glob(f"{stem}*.jsonl") if _SHARD.sub("", file.stem) == stem)


def shard_of(file: Path) -> Shard:
    """Returns the shard of a ledger."""
    match = _SHARD.search(file.stem)
    return Shard(int(match[1]), int(match[2])) if match else Shard(0, 1)


def round_of(file: Path) -> int:
    """Returns the round of a ledger; of a stream's, the first of those of its tasks."""
    match = _ROUND.match(file.name)
    assert match, "named by ledger_file"
    return int(match[1])


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
    return RunLedger(file, round_, settings.tasks, settings.target, resume=resume, judge=judge, **agent)


def _stem(round_: str, split: Split | None, *, of_branches: bool) -> str:
    return f"{'branches-' if of_branches else ''}round-{round_}{f'-{split}' if split else ''}"


def run_folder(run_id: str) -> Path:
    """Returns the folder of a run's ledgers: two runs have two folders, whatever their names."""
    name = "".join(c if c.isalnum() or c in "-_." else quote(c, safe="", errors="surrogatepass") for c in run_id)
    return home() / "rollouts" / (f"%2E{name[1:]}" if name.startswith(".") else name)


def points_file(run_id: str, round_: int) -> Path:
    """Returns the path of a run's branch points: `$TRAINSPAN_HOME/rollouts/{run}/branch-points-NNNN.jsonl`."""
    return run_folder(run_id) / f"branch-points-{round_:04d}.jsonl"


def recorded_agent(run_id: str, round_: int, split: Split | None) -> tuple[str, RecordedAgent] | None:
    """Returns task file (`-`: standard input) and agent of a run's rollouts of a round; None if they are not recorded."""
    for file in (*ledger_files(run_id, round_, split), *ledger_files(run_id, round_, None)):
        with file.open("rb") as lines:
            head = _head(file, lines.readline())
        if head is None:
            return None
        return head["tasks"], RecordedAgent(tuple(head["target"]), head.get("harness"), head.get("workspace"))
    return None


def _head(file: Path, line: bytes) -> JsonObject | None:
    """The first line of a ledger; None if it is not complete, as after a power loss."""
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except ValueError:
        _log.warning("event=ledger_head_damaged file=%s", file)
        return None


def recorded_rewards(file: Path) -> dict[tuple[str, int], float]:
    """Returns (rollout id, attempt) → reward for the finished, rewarded rollouts in a ledger; empty without a file."""
    begun: dict[str, tuple[str, int]] = {}
    rewards: dict[tuple[str, int], float] = {}
    for line in _lines(file):
        if isinstance(line, _Begin):
            begun[line.key] = line.rollout_id, line.attempt
        elif isinstance(line, _End) and line.outcome.reward is not None and line.key in begun:
            rewards[begun[line.key]] = line.outcome.reward
    return rewards


def task_outcomes(file: Path) -> dict[str, list[Finished]]:
    """Returns task id → outcomes of its finished rollouts in a ledger, of each the last attempt's; empty without a file."""
    last = {line.key: line.outcome for line in _lines(file) if isinstance(line, _End)}
    outcomes: dict[str, list[Finished]] = {}
    for key, outcome in last.items():
        _, _, task_id = key.partition(":")
        outcomes.setdefault(task_id, []).append(outcome)
    return outcomes


def statuses(file: Path) -> tuple[int, Counter[str], list[float]]:
    """Returns the number of rollouts that have begun, final status → finished rollouts, and the rewards of these."""
    begun: set[str] = set()
    ended: dict[str, Finished] = {}
    for line in _lines(file):
        if isinstance(line, _Begin):
            begun.add(line.key)
            ended.pop(line.key, None)  # another attempt
        elif isinstance(line, _End):
            ended[line.key] = line.outcome
    rewards = [outcome.reward for outcome in ended.values() if outcome.reward is not None]
    return len(begun), Counter(outcome.status for outcome in ended.values()), rewards


def _lines(file: Path) -> Iterator[_Line]:
    """Yields the complete lines of a ledger file after the first."""
    if file.exists():
        with file.open("rb") as lines:
            next(lines, None)
            yield from _whole(file, lines)


def _whole(file: Path, lines: Iterable[bytes]) -> Iterator[_Line]:
    """Yields the whole lines; one that is being written, or was cut off by a kill or a full disk, is none."""
    damaged = 0
    for line in lines:
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
        except ValueError:
            damaged += 1
            continue
        yield _parsed(record)
    if damaged:
        _log.warning("event=ledger_lines_damaged file=%s lines=%d: their rollouts count as unfinished", file, damaged)


def _parsed(record: JsonObject) -> _Line:
    if "begin" in record:
        return _Begin(record["begin"], record["rollout"], record["attempt"], record.get("span"))
    if "delivered" in record:
        return _Delivered(record["delivered"], record["attempt"])
    outcome = Finished(record["status"], record["reward"])
    return _End(record["end"], record["rollout"], record["attempt"], outcome, record.get("span"))


class RunLedger:
    """Appends a line as each rollout starts and is delivered; thread-safe."""

    def __init__(
        self,
        file: Path,
        round_: int,
        tasks: Path,
        target: Iterable[str],
        *,
        resume: bool,
        judge: tuple[str, str] | None = None,
        harness: str | None = None,
        workspace: str | None = None,
    ) -> None:
        """Starts a new file, or with `resume` continues the existing one. `judge` is its name and digest.

        Raises UsageError if there is nothing to resume, if the run had another task file, agent or judge (its verdicts would be
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
        head: JsonObject = {"tasks": "-" if tasks == STDIN else str(tasks.resolve()), "target": list(target)}
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

    def record_start(self, identity: Identity, number: int, span: JsonObject | None = None) -> None:
        """Records the start of an attempt, with the `span` that a later process sends if this one is killed before it ends."""
        key = self._key(identity.round, identity.task_id or "", number)
        self._write({"begin": key, "rollout": identity.rollout_id, "attempt": identity.attempt, "span": span})

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
        if (stored := _head(file, first)) is None:  # the process before could not write it
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
        for line in _whole(file, lines):
            self._resume(line)

    def _resume(self, line: _Line) -> None:
        _wait_or_not(self._waiting, line)
        if isinstance(line, _Begin):
            self._begun[line.key] = Begun(line.rollout_id, line.attempt)
            self._finished.pop(line.key, None)  # of an earlier attempt: a group that is compared is repeated whole
        if not isinstance(line, _End):
            return
        if line.outcome.status not in REPEATED:
            self._finished[line.key] = line.outcome

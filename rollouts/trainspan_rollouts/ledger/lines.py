"""The lines of a ledger."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.status import RolloutStatus

__all__ = ["Begin", "Delivered", "End", "Finished", "Line", "head_of", "lines_of", "note_waiting", "whole_lines"]

_log = logging.getLogger(__name__)


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
class Begin:
    """A line of a rollout's attempt that began; `key` names its task and number (see `RunLedger`)."""

    key: str
    rollout_id: str
    attempt: int
    task: str
    """Digest of the task."""
    span: JsonObject | None
    """Stands for the attempt if no end follows."""


@dataclass(frozen=True, slots=True)
class End:
    """A line of an attempt that ended; with its span, if the collector has not acknowledged it."""

    key: str
    rollout_id: str
    attempt: int
    outcome: Finished
    span: JsonObject | None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A line of an attempt whose span the collector has acknowledged since."""

    rollout_id: str
    attempt: int


Line: TypeAlias = Begin | End | Delivered


def note_waiting(waiting: dict[tuple[str, int], JsonObject], line: Line) -> None:
    """Notes the span of an attempt that a line says is not delivered yet, or takes it out."""
    span = None if isinstance(line, Delivered) else line.span
    if span is None:
        waiting.pop((line.rollout_id, line.attempt), None)
    else:
        waiting[line.rollout_id, line.attempt] = span


def head_of(file: Path, line: bytes) -> JsonObject | None:
    """The first line of a ledger; None if it is not complete, as after a power loss."""
    try:
        return json.loads(line)  # type: ignore[no-any-return]
    except ValueError:
        _log.warning("event=ledger_head_damaged file=%s", file)
        return None


def lines_of(file: Path) -> Iterator[Line]:
    """Yields the complete lines of a ledger file after the first."""
    if file.exists():
        with file.open("rb") as lines:
            next(lines, None)
            yield from whole_lines(file, lines)


def whole_lines(file: Path, lines: Iterable[bytes]) -> Iterator[Line]:
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


def _parsed(record: JsonObject) -> Line:
    if "begin" in record:
        return Begin(record["begin"], record["rollout"], record["attempt"], record["task"], record.get("span"))
    if "delivered" in record:
        return Delivered(record["delivered"], record["attempt"])
    outcome = Finished(record["status"], record["reward"])
    return End(record["end"], record["rollout"], record["attempt"], outcome, record.get("span"))

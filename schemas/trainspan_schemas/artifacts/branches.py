"""Where branches begin: states of stored rollouts, each with the task of its rollout, as a file of JSON lines."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from trainspan_schemas.errors import InvalidRecordError
from trainspan_schemas.files.durable import sync
from trainspan_schemas.telemetry.prefix import ForcedCall

__all__ = [
    "BRANCH_TASK",
    "BranchOrigin",
    "BranchPoint",
    "BranchSource",
    "StoredCalls",
    "branch_task_id",
    "read_points",
    "write_points",
]

BRANCH_TASK: Final = r"@[^@]+[.][0-9]{1,9}@[0-9]{1,9}$"
"""Regular expression for the task ids of branches, also in DuckDB and Polars. Rollouts with an @ in their id are not branched."""


@dataclass(frozen=True, slots=True)
class BranchOrigin:
    """The call of a stored rollout that a branch samples anew."""

    rollout_id: str
    attempt: int
    call: int
    """Its position in the rollout, from 0."""

    @classmethod
    def of_task(cls, task_id: str) -> "BranchOrigin | None":
        """What the task id of a branch says; None for any other task."""
        if re.search(BRANCH_TASK, task_id) is None:
            return None
        _, origin, call = task_id.rsplit("@", 2)
        rollout_id, _, attempt = origin.rpartition(".")
        return cls(rollout_id, int(attempt), int(call))


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The state of a stored rollout before one of its calls."""

    rollout_id: str
    attempt: int
    call: int
    """Position of the call in its rollout, from 0: the number of calls that a branch repeats."""
    round: int
    """Of the rollout and its branches."""
    task: Mapping[str, Any]
    """The fields of the rollout's task, as in a task file."""
    answered_s: float = 0.0
    """Seconds that the model took for the calls before it. A branch gets these answers at once, and has so much less time."""

    @property
    def task_id(self) -> str:
        """The task id of the branches: those of one point are one group, apart from the rollouts of the task itself."""
        return branch_task_id(str(self.task["id"]), self.rollout_id, self.attempt, self.call)


@dataclass(frozen=True, slots=True)
class StoredCalls:
    """The stored calls around a branch point."""

    repeated: tuple[ForcedCall, ...]
    """Before the point."""
    later: tuple[str, ...]
    """Digests of the prompts after it (`prompt_digest`)."""
    point: bytes
    """The packed prompt of the call at the point."""


class BranchSource(Protocol):
    """Reads the stored calls of rollouts."""

    def calls(self, point: BranchPoint) -> StoredCalls:
        """May be called from several threads. Raises TrainspanError."""
        ...


def branch_task_id(task_id: str, rollout_id: str, attempt: int, call: int) -> str:
    """The task id of the branches before a call of a rollout of `task_id`."""
    return f"{task_id}@{rollout_id}.{attempt}@{call}"


def write_points(file: Path, points: Iterable[BranchPoint]) -> None:
    """Writes the file whole or not at all; only its user can read it, as it has the tasks' answers."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}")
    temporary.touch(mode=0o600)
    with temporary.open("w") as lines:
        lines.writelines(json.dumps(asdict(point)) + "\n" for point in points)
    sync(temporary)
    temporary.replace(file)
    sync(file.parent)


def read_points(file: Path) -> Iterator[BranchPoint]:
    """Yields the points in order. Raises InvalidRecordError."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield BranchPoint(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise InvalidRecordError(f"{file}:{number}: not a branch point ({error})") from error

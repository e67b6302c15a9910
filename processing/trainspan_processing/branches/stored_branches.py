"""Branches in the store: those of a rollout, and what a branch says about itself."""

from dataclasses import dataclass
from typing import Final

from trainspan_processing.read.source import Selection, Source
from trainspan_schemas.artifacts.branches import BranchOrigin

__all__ = ["StoredBranch", "read_branches"]

_COLUMNS: Final = ("rollout_id", "attempt", "task_id", "run_id", "status", "reward", "end_ns", "untrusted")


@dataclass(frozen=True, slots=True)
class StoredBranch:
    """One branch of a rollout."""

    call: int
    """Position of the call that it samples anew."""
    rollout_id: str
    attempt: int
    run_id: str | None
    status: str | None
    reward: float | None
    """The evaluation `reward`, as the view `rollouts` has it."""


def read_branches(source: Source, rollout_id: str, attempt: int) -> list[StoredBranch]:
    """The ended branches that a runner began from this attempt, by call, then in the order in which they ended."""
    branches: dict[tuple[str, int], tuple[tuple[int, int], StoredBranch]] = {}
    for batch in source.read("rollouts", Selection(), _COLUMNS, branches_of=rollout_id):
        for branch_id, number, task_id, run_id, status, reward, end_ns, untrusted in batch.select(_COLUMNS).iter_rows():
            origin = None if untrusted else BranchOrigin.of_task(task_id or "")
            if origin is None or (origin.rollout_id, origin.attempt) != (rollout_id, attempt):
                continue
            branch = StoredBranch(origin.call, branch_id, number or 0, run_id, status, reward)
            branches[branch.rollout_id, branch.attempt] = ((branch.call, end_ns or 0), branch)
    return [branch for _, branch in sorted(branches.values(), key=lambda entry: (entry[0], entry[1].rollout_id))]

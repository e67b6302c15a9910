"""What a rollout was run with: the runner's record of its run's target and tasks, and the judge on its span."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainspan_rollouts.run_ledger import recorded_target
from trainspan_rollouts.task_file import read_tasks
from trainspan_schemas.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

__all__ = ["only_judge", "recorded_or_given", "tasks_by_id"]


def recorded_or_given(
    rollouts: "pl.DataFrame", target: Sequence[str], tasks: str | None
) -> tuple[tuple[str, ...], Path]:
    """Target and task file: as given, otherwise as the runner recorded them for the rollouts' runs, rounds and splits.

    Raises UsageError if they are not known.
    """
    kinds = rollouts.select("run_id", "round", "split").unique(maintain_order=True).drop_nulls("run_id").iter_rows()
    recorded = {found for kind in kinds if (found := recorded_target(kind[0], kind[1] or 0, kind[2])) is not None}
    targets = {tuple(target)} if target else {found for _, found in recorded}
    files = {tasks} if tasks else {file for file, _ in recorded if file != "-"}
    if len(targets) != 1:
        raise UsageError(
            f"{_how_many(targets)} recorded for these rollouts: name the agent, as for `trainspan rollout`"
        )
    if len(files) != 1:
        raise UsageError(f"{_how_many(files)} recorded for the tasks of these rollouts: name the file with --tasks")
    return targets.pop(), Path(files.pop())


def only_judge(judges: Sequence[str | None], given: str | None) -> str | None:
    """The judge: as given, otherwise the one that judged the rollouts. Raises UsageError if there were several."""
    if given is not None:
        return given
    if len(found := set(judges)) > 1:
        raise UsageError("these rollouts had several judges: name one with --judge")
    return found.pop() if found else None


def tasks_by_id(file: Path, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """The fields of the wanted tasks that are in the file. Raises TaskFileError."""
    return {task.id: task.for_judge() for task in read_tasks(file) if task.id in wanted}


def _how_many(found: set[Any]) -> str:
    return f"{len(found)} are" if found else "none is"

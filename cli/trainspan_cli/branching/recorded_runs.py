"""What a rollout was run with: the runner's record of its run's agent and tasks, and the judge on its span."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainspan_rollouts.ledger.recorded import RecordedAgent, recorded_agent
from trainspan_rollouts.task_file import read_tasks
from trainspan_schemas.errors import UsageError
from trainspan_schemas.files.durable import JsonObject
from trainspan_schemas.telemetry.identity import Split

if TYPE_CHECKING:
    import polars as pl

__all__ = ["TaskFiles", "only_judge", "recorded_or_given", "tasks_by_id"]


TaskFiles: TypeAlias = Mapping[tuple[str | None, int | None, Split | None], Path]
"""Run, round and split → the task file of their rollouts."""


def recorded_or_given(
    rollouts: "pl.DataFrame", target: Sequence[str], tasks: str | None
) -> tuple[RecordedAgent, TaskFiles]:
    """Agent and task files: as given, otherwise as the runner recorded them for the rollouts' runs, rounds and splits.

    Raises UsageError if they are not known.
    """
    kinds = [*rollouts.select("run_id", "round", "split").unique(maintain_order=True).iter_rows()]
    recorded = {
        kind: files_and_agent
        for kind in kinds
        if kind[0] is not None and (files_and_agent := recorded_agent(kind[0], kind[1] or 0, kind[2])) is not None
    }
    agents = {RecordedAgent(tuple(target))} if target else {agent for _, agent in recorded.values()}
    if len(agents) != 1:
        raise UsageError(f"{_how_many(agents)} recorded for these rollouts: name the agent, as for `trainspan rollout`")
    files = {}
    for kind in kinds:
        file = tasks or (recorded[kind][0] if kind in recorded else "-")
        if file == "-":
            raise UsageError(
                f"no task file is recorded for run {kind[0]}, round {kind[1]}, split {kind[2]}: name the file with --tasks"
            )
        files[kind] = Path(file)
    return agents.pop(), files


def only_judge(judges: Sequence[str | None], given: str | None) -> str | None:
    """The judge: as given, otherwise the one that judged the rollouts. Raises UsageError if there were several."""
    if given is not None:
        return given
    if len(distinct := set(judges)) > 1:
        raise UsageError("these rollouts had several judges: name one with --judge")
    return distinct.pop() if distinct else None


def tasks_by_id(file: Path, wanted: set[str]) -> dict[str, JsonObject]:
    """The fields of the wanted tasks that are in the file. Raises TaskFileError."""
    return {task.id: task.for_judge() for task in read_tasks(file) if task.id in wanted}


def _how_many(distinct: set[Any]) -> str:
    return f"{len(distinct)} are" if distinct else "none is"

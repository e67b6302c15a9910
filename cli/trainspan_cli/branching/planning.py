"""The branches of a run: which rollouts, from which states, with which task."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspan_cli.branching.recorded_runs import TaskFiles, only_judge, recorded_or_given, tasks_by_id
from trainspan_processing.branches.candidates import Candidates, find_candidates, newest_round, rounds_of
from trainspan_processing.branches.choice import CallChoice, branch_points
from trainspan_processing.explain.inquiry import Question, locate
from trainspan_processing.read.source import Selection, Source
from trainspan_processing.tables import ROLLOUT_KEY
from trainspan_rollouts.ledger.paths import points_file
from trainspan_rollouts.ledger.recorded import RecordedAgent
from trainspan_schemas.artifacts.branches import BranchPoint, read_points, write_points
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import NothingToBranchError, UsageError

__all__ = ["BranchPlan", "BranchScope", "plan_branches"]


@dataclass(frozen=True, slots=True)
class BranchScope:
    """Which rollouts and calls to branch."""

    choice: CallChoice
    rollout_ids: tuple[str, ...] | None = None
    """Whole ids, or beginnings of them."""
    of_run: str | None = None
    of_round: int | None = None
    """With the run; None: all its rounds. Without ids and run: the newest round."""
    limit: int | None = None
    """Rollouts."""


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """The branches of a run, on disk and in memory."""

    file: Path
    task_files: tuple[Path, ...]
    """The files with the tasks of the branched rollouts, and their answers."""
    points: tuple[BranchPoint, ...]
    candidates: Candidates
    agent: RecordedAgent
    judge: str | None
    skipped_states: Counter[str]
    """Reason → states that no branch can begin at."""
    skipped: Counter[str]
    """Reason → rollouts that cannot be branched."""


def plan_branches(
    source: Source,
    scope: BranchScope,
    settings: DatasetSettings,
    run_id: str,
    target: Sequence[str],
    tasks: str | None,
    judge: str | None,
    *,
    resume: bool,
    now_ns: int,
) -> BranchPlan:
    """Plans a run's branches and writes their points, or with `resume` reads them again.

    Raises UsageError, NothingToBranchError.
    """
    file = points_file(run_id, scope.of_round or 0)
    points = _resumed(file) if resume else None
    ids = tuple(dict.fromkeys(point.rollout_id for point in points)) if points else _ids(source, scope, settings)
    candidates = find_candidates(source, _selections(source, scope, ids), settings, ids, now_ns=now_ns)
    candidates = candidates.sample(None if resume else scope.limit)
    skipped = Counter(candidates.skipped)
    if candidates.rollouts.is_empty():
        raise NothingToBranchError(
            f"no rollout can be branched{_why(skipped)}; choose others with --rollout or --of-run{_hint(skipped)}"
        )
    rollouts = candidates.rollouts
    agent, task_files = recorded_or_given(rollouts, target, tasks)
    chosen_judge = only_judge(rollouts["judge"].to_list(), judge)
    skipped_states: Counter[str] = Counter()
    if points is None:
        points, skipped_states = _points(candidates, scope.choice, task_files, skipped)
        if not points:
            raise NothingToBranchError(
                f"no state can be branched{_why(skipped + skipped_states)}: the rollouts have one call, no call was chosen, or none is "
                "repeatable"
            )
        write_points(file, points)
    files = tuple(set(task_files.values()))
    return BranchPlan(file, files, tuple(points), candidates, agent, chosen_judge, skipped_states, skipped)


def _resumed(file: Path) -> list[BranchPoint]:
    if not file.is_file():
        raise UsageError(f"nothing to resume: {file} does not exist; run without --resume first")
    return list(read_points(file))


def _ids(source: Source, scope: BranchScope, settings: DatasetSettings) -> tuple[str, ...] | None:
    """The whole ids of the named rollouts. Raises UsageError if one is unknown, or begins several ids."""
    if scope.rollout_ids is None:
        return None
    rollout_ids = (locate(source, Question(source.stores, name, settings)).rollout_id for name in scope.rollout_ids)
    return tuple(dict.fromkeys(rollout_ids))


def _selections(source: Source, scope: BranchScope, ids: tuple[str, ...] | None) -> list[Selection]:
    if ids is not None:
        return rounds_of(source, ids)
    if scope.of_run is not None:
        return [Selection(scope.of_run, scope.of_round)]
    newest = newest_round(source)
    return [newest] if newest else []


def _points(
    candidates: Candidates, choice: CallChoice, task_files: TaskFiles, skipped: Counter[str]
) -> tuple[list[BranchPoint], Counter[str]]:
    chosen, skipped_states = branch_points(candidates.states, choice, candidates.with_known_start)
    facts = {(row["rollout_id"], row["attempt"]): row for row in candidates.rollouts.iter_rows(named=True)}
    wanted = {row["task_id"] for row in facts.values()}
    tasks = {file: tasks_by_id(file, wanted) for file in set(task_files.values())}
    points, without_task = [], set()
    call_key = [*ROLLOUT_KEY, "call"]
    chosen = chosen.join(candidates.states.select(*call_key, "answered_s"), on=call_key, maintain_order="left")
    for rollout_id, attempt, call, answered_s in chosen.iter_rows():
        row = facts[rollout_id, attempt]
        file = task_files[row["run_id"], row["round"], row["split"]]
        if (task := tasks[file].get(row["task_id"])) is None:
            without_task.add((rollout_id, attempt, file.name))
            continue
        split = {"split": row["split"]} if row["split"] else {}
        given = {key: value for key, value in task.items() if value is not None}
        points.append(BranchPoint(rollout_id, attempt, call, row["round"] or 0, {**given, **split}, answered_s))
    skipped.update(f"task not in {name}" for _, _, name in without_task)
    return points, skipped_states


def _hint(skipped: Counter[str]) -> str:
    return ", or say what their reward is, as for the dataset (--reward, --reward-name)" if skipped["no reward"] else ""


def _why(skipped: Counter[str]) -> str:
    return f" ({', '.join(f'{count} {reason}' for reason, count in skipped.most_common())})" if skipped else ""

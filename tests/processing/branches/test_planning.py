"""Which rollouts `trainspan branch` takes: named ones, also by the beginning of their id, and those of a round of a run."""

import json
from pathlib import Path

import pytest

from tests.cli.test_main import trainspan
from tests.processing.conftest import Bench
from tests.processing.support.traces import chain
from trainspan_cli.branching.planning import BranchScope, plan_branches
from trainspan_processing.branches.choice import CallChoice
from trainspan_schemas.artifacts.branches import BranchPoint
from trainspan_schemas.config.settings import DatasetSettings
from trainspan_schemas.errors import UsageError


def one_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a task, in what is the home from now on."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(folder))
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "t0", "input": "x"}) + "\n")
    return tasks


def test_rollouts_are_named_by_the_beginnings_of_their_ids(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = one_task(tmp_path, monkeypatch)
    bench.send(*(chain(bench.rollout(name), 2).reward(1.0) for name in ("abc", "abd", "long")))

    def planned(*names: str) -> tuple[BranchPoint, ...]:
        scope = BranchScope(CallChoice(), tuple(f"{bench.run_id}-{name}" for name in names))
        settings, target = DatasetSettings(), ["agent:solve"]
        with bench.source() as source:
            plan = plan_branches(
                source, scope, settings, "new", target, str(tasks), None, resume=False, now_ns=bench.now
            )
        return plan.points

    points = planned("abc", "abd", "lo")
    assert [point.rollout_id for point in points] == [f"{bench.run_id}-{name}" for name in ("abc", "abd", "long")]
    assert [(point.call, point.answered_s) for point in points] == [(1, 0.5)] * 3
    assert planned("abc", "abc") == points[:1]
    with pytest.raises(UsageError, match="is a prefix of 2 rollout ids"):
        planned("ab")
    with pytest.raises(UsageError, match=r"no rollout '.*-x'"):
        planned("long", "x")


def test_a_resumed_run_has_the_rollouts_of_its_points_whatever_the_limit(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = one_task(tmp_path, monkeypatch)
    bench.send(*(chain(bench.rollout(name), 2).reward(1.0) for name in ("a", "b", "c")))

    def planned(limit: int | None, *, resume: bool) -> tuple[set[str], set[str]]:
        scope, settings = BranchScope(CallChoice(), of_run=bench.run_id, limit=limit), DatasetSettings()
        with bench.source() as source:
            plan = plan_branches(
                source, scope, settings, "new", ["agent:solve"], str(tasks), None, resume=resume, now_ns=bench.now
            )
        return {point.rollout_id for point in plan.points}, set(plan.candidates.rollouts["rollout_id"])

    ids, candidates = planned(2, resume=False)
    assert len(ids) == 2
    assert candidates == ids
    assert planned(1, resume=True) == (ids, ids)


def test_a_round_without_its_run_is_refused() -> None:
    """The newest round would be branched instead."""
    answer = trainspan("branch", "--of-round", "3")
    assert (answer.returncode, answer.stderr) == (2, "trainspan: --of-round 3: name its run with --of-run\n")

"""The checkpoint of the best validation is kept, also if the loop ended right after the validation's record."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loop.run_results import run_result
from tests.training.support.swap_server import USUAL
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks
from trainspan_loop.validation import Validations
from trainspan_rollouts.ledger.paths import ledger_file
from trainspan_rollouts.records import Shard
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.home import policy_dir
from trainspan_schemas.intervals import RewardEstimate
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry

Policy = str | None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    return RunFolder.create({})


def train(folder: RunFolder, name: str, policy: Policy = None) -> None:
    root = policy_dir(folder.checkpoints, policy)
    (root / name).mkdir(parents=True)
    CheckpointLedger(root).append(LedgerEntry("published", None, name))


def validated(folder: RunFolder, round_: int, mean: float, **versions: Any) -> None:
    """A validation is recorded, and the loop ends before it can keep the checkpoint."""
    estimate = RewardEstimate(4, mean, 0.5, True).record()
    folder.append({"kind": "eval", "name": "validation", "round": round_, "tasks": 4, **versions, **estimate})


def resume(folder: RunFolder, *policies: Policy) -> dict[str, Any] | None:
    """Starts the loop again, which has no validation left to run; returns what it kept."""
    unused: Any = None
    stages: Any = SimpleNamespace(policies=policies or (None,))
    Validations(Settings(), LoopTasks(None, None, None, None), unused, stages, folder, unused).run(0, 4)
    best: dict[str, Any] | None = folder.read("run.json").get("best")
    return best


def test_the_start_model_that_a_run_with_trials_has_kept_can_be_the_best(folder: RunFolder) -> None:
    train(folder, "policy-000000")
    train(folder, "policy-000001")
    validated(folder, 0, 0.75, policy_version=0)
    validated(folder, 1, 0.25, policy_version=1)
    best = resume(folder)
    assert best is not None
    assert Path(best["checkpoint"]).name == "policy-000000"


def test_a_resumed_loop_keeps_the_best_checkpoint_that_an_earlier_one_could_not(folder: RunFolder) -> None:
    train(folder, "policy-000001")
    train(folder, "policy-000002")
    validated(folder, 0, 0.5, policy_version=0)
    assert resume(folder) is None, "the model that the run starts from is no checkpoint of the run"
    validated(folder, 2, 0.75, policy_version=2)
    validated(folder, 3, 0.25, policy_version=1)
    best = resume(folder)
    assert best is not None
    assert (best["round"], best["checkpoint"]) == (2, str(folder.path / "best" / "policy-000002"))
    assert Path(best["checkpoint"]).is_dir()


def test_a_pruned_checkpoint_and_one_that_is_kept_change_nothing(folder: RunFolder) -> None:
    for round_, mean in ((1, 0.5), (2, 0.75)):
        name = f"policy-{round_:06d}"
        train(folder, name)
        validated(folder, round_, mean, policy_version=round_)
        if round_ == 1:
            assert resume(folder) is not None
        shutil.rmtree(folder.checkpoints / name)
    best = resume(folder)
    assert best is not None
    assert (best["round"], Path(best["checkpoint"]).is_dir()) == (1, True)


def test_of_several_policies_all_that_the_run_trained_are_kept_together(folder: RunFolder) -> None:
    train(folder, "policy-000001", "writer")
    versions = {"writer": {"policy_version": 1}, "rewriter": {"policy_version": 0}}
    validated(folder, 1, 0.5, policy_version=None, policies=versions)
    best = resume(folder, "writer", "rewriter")
    assert best is not None
    assert [path.name for path in Path(best["checkpoint"]).iterdir()] == ["writer"]
    train(folder, "policy-000002", "writer")
    train(folder, "policy-000001", "rewriter")
    versions = {"writer": {"policy_version": 2}, "rewriter": {"policy_version": 1}}
    validated(folder, 2, 0.75, policy_version=None, policies=versions)
    shutil.rmtree(folder.checkpoints / "rewriter" / "policy-000001")
    assert resume(folder, "writer", "rewriter") == best, "one of them was pruned"


@pytest.mark.parametrize(("failed", "ok"), [(1, True), (2, False)])
def test_a_validation_counts_what_its_mean_leaves_out_and_too_much_is_an_alarm(
    folder: RunFolder, failed: int, ok: bool
) -> None:
    outcomes = [("ok", 1.0)] * 9 + [("agent_error", None)] * failed  # 1 of 10, 2 of 11
    lines: list[dict[str, Any]] = [{"tasks": "tasks", "target": ["a"]}]
    lines += [
        {"end": f"0:t{number}", "rollout": f"r{number}", "attempt": 0, "status": status, "reward": reward}
        for number, (status, reward) in enumerate(outcomes)
    ]
    ledger = ledger_file(folder.run_id, 3, "val", Shard(0, 1))
    ledger.parent.mkdir(parents=True)
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    total = 9 + failed
    collected = SimpleNamespace(checks=[], versions={"policy": [2]}, result=run_result(9), seconds=1.0)
    stages: Any = SimpleNamespace(policies=(None,), collect=lambda *_: collected)
    server = SimpleNamespace(state=lambda: replace(USUAL, alone=replace(USUAL.alone, version=2)))
    services: Any = SimpleNamespace(policy=server, level_servers=list)
    pool = type("Pool", (), {"draw": lambda _, count, seed: ["{}"] * count, "__len__": lambda _: total})()
    screen: Any = SimpleNamespace(collecting=lambda *_: None, record=lambda _: None)
    Validations(Settings(), LoopTasks(None, pool, None, None), services, stages, folder, screen).run(3, total)
    (record,) = folder.records()
    assert (record["mean"], record["n"], record["left_out"], record["n_rollouts"]) == (1.0, 9, failed, total)
    (check,) = [one for one in record["checks"] if one["name"] == "rollouts have a reward"]
    assert check["ok"] is ok
    assert check["detail"].startswith(f"{failed} of {total} rollouts have no reward: agent_error {failed}")

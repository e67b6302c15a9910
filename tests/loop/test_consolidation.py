"""Which runs end with supervised training on their own successes, where it starts, and what decides."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.support.swap_server import USUAL
from trainspan_loop import consolidation
from trainspan_loop.consolidation import Consolidation, check_consolidation
from trainspan_loop.state.run_folder import RunFolder
from trainspan_loop.state.task_pool import LoopTasks, TaskPool
from trainspan_schemas.artifacts.checkpoint import write_latest
from trainspan_schemas.command_events import FineTuned
from trainspan_schemas.config.loop import LoopSettings
from trainspan_schemas.config.policies import PolicySettings
from trainspan_schemas.config.settings import Settings
from trainspan_schemas.config.training import ModelSettings, TrainSettings
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.intervals import RewardEstimate
from trainspan_training.checkpoints.ledger import CheckpointLedger, LedgerEntry

WANTED = LoopSettings(consolidate=True, target="a:b")


@pytest.fixture
def tasks(tmp_path: Path) -> LoopTasks:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "v", "input": "1", "split": "val"}\n')
    return LoopTasks(None, TaskPool(file, "val"), None, None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    made = RunFolder.create({})
    made.checkpoints.mkdir()
    return made


def train(folder: RunFolder, version: int) -> None:
    name = f"policy-{version:06d}"
    (folder.checkpoints / name).mkdir()
    parent = f"policy-{version - 1:06d}"
    meta = {"kind": "full", "version": version, "parent": parent, "base": "m", "dataset_sha256": None}
    (folder.checkpoints / name / "trainspan.json").write_text(json.dumps(meta))
    CheckpointLedger(folder.checkpoints).append(LedgerEntry("published", None, name))
    write_latest(folder.checkpoints, name)


def validated(folder: RunFolder, round_: int, mean: float) -> None:
    estimate = RewardEstimate(4, mean, 0.5, True).record()
    folder.append(
        {"kind": "eval", "name": "validation", "round": round_, "tasks": 4, "policy_version": round_, **estimate}
    )


class Loop:
    """A consolidation whose processes are replaced: `sft` makes version 3, which is validated with a mean."""

    def __init__(self, folder: RunFolder, tasks: LoopTasks, mean: float) -> None:
        self.folder, self.mean = folder, mean
        self.commands: list[list[str]] = []
        now = replace(USUAL.alone, version=3, canary={"status": "fresh", "evidence": "e"})
        server = SimpleNamespace(url="http://s", state=lambda: replace(USUAL, alone=now))
        self.services: Any = SimpleNamespace(
            config=[], beside_server={}, policy=server, stop_trainers=lambda: None, keep_alive=lambda: None
        )
        screen: Any = SimpleNamespace(stage=lambda _: None, note=lambda _: None, policy=lambda _: None)
        settings = Settings(loop=WANTED, train=TrainSettings(model="start", seed=7))
        self.made = Consolidation(settings, tasks, self.services, self, folder, screen)  # type: ignore[arg-type]

    def again(self, before: dict[str, Any]) -> dict[str, Any]:
        estimate = RewardEstimate(4, self.mean, 0.5, True).record()
        return {**before, "name": "consolidated", "policy_version": 3, **estimate, "seconds": 1.0, "checks": []}

    def append(self, record: dict[str, Any]) -> None:
        self.folder.append(record)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> str | None:
        loop = self

        class Commands:
            def run(self, arguments: list[str], environ: object, log: Path, on_event: Any) -> tuple[int, str]:
                loop.commands.append(arguments)
                train(loop.folder, 3)
                figures = dict.fromkeys(
                    ("examples", "answers", "steps", "learning_rate", "epochs", "tokens", "trained_tokens"), 1
                )
                on_event(FineTuned("out", was_there=False, version=3, manifest={"dropped": {}, **figures}))
                return 0, ""

        monkeypatch.setattr(consolidation, "Commands", Commands)
        return self.made.run(2)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Settings(loop=WANTED, policies={"writer": PolicySettings()}), "several policies"),
        (Settings(loop=WANTED, model=ModelSettings(adapter="lora")), "adapter = 'lora'"),
        (Settings(loop=LoopSettings(consolidate=True, eval_tasks=0)), "no validation tasks"),
    ],
)
def test_what_cannot_be_consolidated_is_refused_if_it_is_asked_for(
    settings: Settings, why: str, tasks: LoopTasks
) -> None:
    with pytest.raises(ConfigError, match=why):
        check_consolidation(settings, tasks)


@pytest.mark.parametrize(
    ("means", "model"),
    [((0.5, 0.4, 0.3), "start"), ((0.3, 0.5, 0.4), "policy-000001"), ((0.3, 0.4, 0.5), "policy-000002")],
)
def test_it_starts_from_the_version_with_the_best_validation(
    means: tuple[float, float, float], model: str, folder: RunFolder, tasks: LoopTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        train(folder, version)
    for round_, mean in enumerate(means):
        validated(folder, round_, mean)
    loop = Loop(folder, tasks, mean=0.75)
    assert loop.run(monkeypatch) is None
    (command,) = loop.commands
    assert Path(command[command.index("--model") + 1]).name == model
    assert command[command.index("--seed") + 1] == "7"
    assert loop.run(monkeypatch) is None
    assert len(loop.commands) == 1, "a resumed run does not train again"


@pytest.mark.parametrize(("mean", "kept"), [(0.25, False), (0.5, True), (0.75, True)])
def test_a_version_is_kept_if_the_mean_of_the_last_validation_does_not_fall(
    mean: float, kept: bool, folder: RunFolder, tasks: LoopTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back: list[int] = []
    monkeypatch.setattr(consolidation, "put_back", lambda version, *_: put_back.append(version))
    for version in (1, 2):
        train(folder, version)
    validated(folder, 1, 0.9)
    validated(folder, 2, 0.5)
    loop = Loop(folder, tasks, mean)
    assert loop.run(monkeypatch) is None
    record = folder.records()[-1]
    assert (record["consolidation"]["kept"], record["consolidation"]["before"]["mean"]) == (kept, 0.5)
    assert put_back == ([] if kept else [2])


def test_a_run_without_training_or_a_signal_says_why_and_live_traffic_is_left_alone(
    folder: RunFolder, tasks: LoopTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated(folder, 2, 0.5)
    assert Loop(folder, tasks, 0.5).run(monkeypatch) == "no round was trained"
    train(folder, 1)
    checks = [{"name": "rewards carry a signal", "ok": False, "detail": ""}]
    folder.append({"kind": "round", "round": 2, "checks": checks})
    assert Loop(folder, tasks, 0.5).run(monkeypatch) == "its rewards look independent of the answers"
    unused: Any = None
    live = Consolidation(Settings(), tasks, unused, unused, folder, unused)
    assert live.run(2) is None
    assert len(folder.records()) == 2

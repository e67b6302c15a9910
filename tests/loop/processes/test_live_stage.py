"""The loop's call of `trainspan dataset` for rollouts of agents that others run. With a real collector."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processing.conftest import Bench, bench, collectors, run_id  # noqa: F401 - fixtures
from tests.processing.support.traces import TestRollout, chain
from tests.support.agents.programs import environment
from trainspan_loop.processes.stages import Stages
from trainspan_schemas.artifacts.dataset import dataset_dir, manifest_path
from trainspan_schemas.config.settings import DatasetSettings, PolicySettings, Settings


def stages_of(bench: Bench, folder: Path, settings: Settings) -> Stages:  # noqa: F811
    services: Any = SimpleNamespace(
        stores=(str(bench.collectors[0].store),),
        environ=environment({"TRAINSPAN_HOME": str(folder)}),
        config=[],
        keep_alive=lambda: None,
    )
    run: Any = SimpleNamespace(run_id="run", logs=folder / "logs", datasets=folder / "dataset")
    screen: Any = SimpleNamespace(note=lambda _: None)
    return Stages(settings, services, run, screen)


def test_one_rollout_with_a_task_does_not_change_the_baseline_of_a_round(bench: Bench, tmp_path: Path) -> None:  # noqa: F811
    stages = stages_of(bench, tmp_path, Settings())
    begin = stages.last_places()

    def clicked(name: str, reward: float, task: str | None = None) -> TestRollout:
        return chain(TestRollout(f"{bench.run_id}-{name}", run=None, round=None, task=task), 1).reward(reward)

    bench.send(clicked("a", 1.0), clicked("b", 0.0), clicked("c", 1.0), clicked("of_a_developer", 1.0, task="t1"))
    assert stages.live_dataset(1, begin) == {}
    manifest = json.loads(manifest_path(dataset_dir(tmp_path / "dataset", 1)).read_bytes())
    assert manifest["credit"]["baseline"] == "running"
    assert manifest["calls_kept"] == 3


@pytest.mark.parametrize(
    ("settings", "baseline"),
    [
        ({}, "running"),
        ({"baseline": "rloo"}, "rloo"),
        ({"credit": "gigpo"}, "grpo"),
        ({"credit": "rtmc"}, "dr_grpo"),
        ({"group_over": "turns"}, "grpo"),
    ],
)
def test_a_live_round_keeps_the_baseline_of_the_settings(settings: dict[str, Any], baseline: str) -> None:
    chosen = Settings(dataset=DatasetSettings(**settings))
    services: Any = SimpleNamespace(stores=())
    assert Stages(chosen, services, services, services)._live_baseline(None) == baseline
    own = PolicySettings(credit="identical", baseline="rae", group_over="rollouts")
    policies = {"writer": PolicySettings(), "editor": own}
    several = Stages(dataclasses.replace(chosen, policies=policies), services, services, services)
    assert [several._live_baseline(name) for name in policies] == [baseline, "rae"]

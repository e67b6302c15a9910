"""docs/training.md matches the code: every figure, every alarm, recipes that work."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests.support.places import ROOT
from trainspan_schemas.config.load import load_settings
from trainspan_training.devices import team
from trainspan_training.metrics.alarms import ALARMS
from trainspan_training.metrics.round_record import RoundRecord
from trainspan_training.objective import options

TRAINING = (ROOT / "docs/training.md").read_text()


def table(page: str, head: str) -> list[list[str]]:
    """The cells of the rows of the table with this header."""
    lines = page[page.index(f"| {head} |") :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_figure_of_a_round_is_documented() -> None:
    names = {name for cells in table(TRAINING, "name | meaning") for name in re.findall(r"`(\w+)`", cells[0])}
    identity = {"round", "version", "checkpoint", "dataset", "error", "learning_rate", "alarms"}
    counts = {"rows", "rollouts", "policy_versions"}
    assert names == {field.name for field in fields(RoundRecord)} - identity - counts


def test_every_alarm_is_documented_with_its_threshold() -> None:
    found = {cells[0].strip("`"): cells[1] for cells in table(TRAINING, "alarm | raised when")}
    assert set(found) == {alarm.name for alarm in ALARMS} | {"engine_mismatch"}
    for alarm in ALARMS:
        assert found[alarm.name].endswith(f"{'>' if alarm.above else '<'} {alarm.threshold:g}"), alarm.name


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TRAINING, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("recipe", blocks("toml"), ids=lambda text: text.splitlines()[1])
def test_recipes_are_admitted(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "trainspan.toml").write_text(recipe)
    options.check(load_settings(tmp_path / "trainspan.toml", {}).train)


@pytest.mark.parametrize("configuration", blocks("yaml"), ids=lambda text: text.split()[1])
def test_the_configurations_of_accelerate_are_admitted(
    configuration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How `accelerate launch` passes the file to the processes that it starts on GPUs, and how the team reads that."""
    from accelerate.commands import launch
    from accelerate.utils import prepare_multi_gpu_env

    file = tmp_path / "accelerate.yaml"
    file.write_text(configuration)
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(file), "program.py"])
    arguments, *_ = launch._validate_launch_command(arguments)
    monkeypatch.setattr(os, "environ", prepare_multi_gpu_env(arguments))
    splits = yaml.safe_load(configuration)["distributed_type"] == "FSDP"
    assert team._splits(arguments.num_processes) is splits

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainspan_cli import main
from trainspan_cli.named_settings import named_settings, set_for_command
from trainspan_schemas.config.load import load_settings

COMMANDS = (
    "rollout",
    "gate",
    "branch",
    "reward",
    "import",
    "dataset",
    "export",
    "sft",
    "train",
    "loop",
    "view",
    "explain",
    "diff",
    "compare",
    "judges",
    "sql",
    "status",
    "collector",
    "serve",
    "swap",
    "store",
    "doctor",
)  # other tests use these names


def trainspan(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trainspan_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    assert main.COMMANDS == COMMANDS
    done = trainspan("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert re.findall(r"^(\w.*):$", done.stdout, re.MULTILINE) == ["Run agents", "Learn", "Look", "Operate"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    done = trainspan(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"trainspan {name}" in done.stdout
    assert "Example" in done.stdout


def test_any_setting_is_given_to_any_command_and_what_follows_two_dashes_is_the_agents() -> None:
    agent = ["--", "python", "agent.py", "--set", "train.x=1"]
    given = ["agent.py:solve", "--set", "rollouts.n=3", "--n", "4", "--set=train.max_ratio=1e3", *agent]
    rest, variables = named_settings(given)
    assert rest == ["agent.py:solve", "--n", "4", *agent]
    assert variables == {"TRAINSPAN_ROLLOUTS__N": "3", "TRAINSPAN_TRAIN__MAX_RATIO": "1e3"}
    with set_for_command(variables):
        chosen = load_settings(None, os.environ)
    assert (chosen.rollouts.n, chosen.train.max_ratio) == (3, 1000.0)
    assert "TRAINSPAN_ROLLOUTS__N" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["datset"], "no command 'datset'; did you mean 'dataset'?"),
        (["loop", "--ronds", "3"], "--ronds"),
        (["loop", "--config", "missing.toml"], "no configuration file missing.toml"),
        (["loop", "--train.kl_coef", "0.1"], "kl_coef is a setting: --set train.kl_coef=VALUE"),
        (
            ["loop", "--loop.seed=3"],
            "seed is a setting: --set loop.seed=VALUE, seed in [loop], or TRAINSPAN_LOOP__SEED",
        ),
        (["train", "--learning_rate", "1"], "--learning-rate"),
        (
            ["train", "--kl-coef", "0.1"],
            "kl_coef is a setting: --set train.kl_coef=VALUE, kl_coef in [train], or TRAINSPAN_",
        ),
        (
            ["train", "--max-ratio", "9"],
            "--set train.max_ratio=VALUE, train.max_ratio in [advanced], or TRAINSPAN_TRAIN__",
        ),
        (["dataset", "--seed", "9"], "--set train.seed=VALUE, --set loop.seed=VALUE"),
        (["train", "--set", "train.kl_coeff=3"], "--set: unknown key 'kl_coeff' in [train]; did you mean 'kl_coef'?"),
        (["train", "--set=kl_coef"], "--set kl_coef: write --set SECTION.KEY=VALUE"),
        (["train", "--set"], "write --set SECTION.KEY=VALUE"),
        (["train", "--set", "train.kl_coef=x"], "train.kl_coef = 'x' is not of type float"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = trainspan(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_the_loop_refuses_a_url_of_datasets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPAN_DATASET__OUT", "s3://bucket/datasets")
    assert main.run(["loop"]) == 2
    assert capsys.readouterr().err == (
        "trainspan: dataset.out is a URL, and the datasets of a loop are in its run folder: remove the setting\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swap", "1", "--checkpoints", "missing"], "trainspan: missing: No such file or directory"),
        (["swap", "1", "--checkpoints", "deep.jsonl"], "trainspan: deep.jsonl: Not a directory"),
        (
            ["rollout", "--tasks", "deep.jsonl", "agent.py:solve"],
            "trainspan: deep.jsonl:1: not JSON (maximum recursion depth",
        ),
        (["status", "--config", "deep.toml"], "trainspan: deep.toml: maximum recursion depth"),
        (["status", "--config", "."], "trainspan: . cannot be read: Is a directory"),
        (["sql", "SELECT 1", "--store", "deep.jsonl"], "is not a valid DuckDB database file!; put back a copy of it"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "deep.toml").write_text(f"a = {'[' * 5_000}{']' * 5_000}")
    (tmp_path / "agent.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPAN_PORTS__BASE", "1")  # where nobody's collector listens
    done = trainspan(*arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1

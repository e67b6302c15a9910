import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainspan_cli import main

COMMANDS = (
    "rollout",
    "branch",
    "reward",
    "dataset",
    "export",
    "sft",
    "train",
    "loop",
    "view",
    "explain",
    "diff",
    "compare",
    "sql",
    "status",
    "collector",
    "serve",
    "weights",
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["datset"], "no command 'datset'; did you mean 'dataset'?"),
        (["loop", "--ronds", "3"], "--ronds"),
        (["loop", "--config", "missing.toml"], "no configuration file missing.toml"),
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
    done = trainspan(*arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1

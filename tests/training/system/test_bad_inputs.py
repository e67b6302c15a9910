"""Inputs of `trainspan train` and `trainspan sft` that cannot be used: one line that names the file and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from trainspan_cli.main import run


def _checkpoint(home: Path, name: str, content: bytes) -> None:
    (home / "checkpoints/policy-000001").mkdir(parents=True)
    (home / "checkpoints/latest").write_text("policy-000001\n")
    (home / "checkpoints/policy-000001" / name).write_bytes(content)


def _latest(home: Path, content: bytes) -> None:
    (home / "checkpoints").mkdir()
    (home / "checkpoints/latest").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "checkpoints is not a folder: choose another --checkpoints": lambda home: (home / "checkpoints").write_text("x"),
    "checkpoints/latest cannot be read (Is a directory): write the name of a checkpoint into it": (
        lambda home: (home / "checkpoints/latest").mkdir(parents=True)
    ),
    "which is not a folder there: write the name of one into it": (lambda home: _latest(home, b"\xff\x00")),
    "trainspan.json is malformed: 'utf-8' codec": lambda home: _checkpoint(home, "trainspan.json", b"\xff\xfe{}"),
    "no dataset in": lambda home: (home / "dataset").rename(home / "elsewhere"),
    "part-0000.parquet (Is a directory): build the dataset again": lambda home: _replace_by_folder(
        home / "dataset/round-0000/part-0000.parquet"
    ),
}


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("message", DAMAGES)
def test_what_train_cannot_use_is_one_line(
    tmp_path: Path,
    model: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    message: str,
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=4), round_=0)
    DAMAGES[message](tmp_path)
    assert run(["train", "--model", str(model_dir), "--policy-url", "none", "--learning-rate", "1e-5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.startswith("trainspan: ")


def test_a_file_is_no_dataset_of_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "examples.jsonl"
    file.touch()
    assert run(["sft", "--dataset", str(file), "--model", "any/model", "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"trainspan: --dataset {file} is a file, no folder of a dataset: name a store with --store, examples with --data"
    )

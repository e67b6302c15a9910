"""The program for TRL's GRPO in docs/training.md: the same calls give the same loss and gradient there as here."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.support.places import ROOT
from tests.training.support.exactness.references import assert_same, gradients, measured, one_step, perturbed
from tests.training.support.sessions import same_weights
from trainspan_processing.dataset.published import open_published
from trainspan_processing.export.candidates import Examples
from trainspan_processing.export.token_rows import token_rows
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.objective.options import clip_range

(_PROGRAM,) = re.findall(
    r"```python\n(import torch\nfrom datasets.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL
)
_TEMPERATURE = 0.7


def _program(model: Path, rows: list[dict[str, Any]], folder: Path) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return _PROGRAM.replace("MODEL_DIR", str(model)).replace("ROWS", str(file))


def _logged(model: Any, folder: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    """Calls whose ratios are on both sides of the clip range, in rollouts of three calls each, and their rows."""
    calls = perturbed(sample_rollouts(model, rollouts=6, turns=3, temperature=_TEMPERATURE, seed=3), spread=0.4)
    return calls, list(token_rows([open_published(write_dataset(folder, calls))], frozenset(), Examples()))


@pytest.mark.parametrize(
    ("settings", "loss_type"),
    [
        (TrainSettings(weights="token"), "dapo"),
        (TrainSettings(), "grpo"),
        (TrainSettings(weights="const", const_tokens=512), "dr_grpo"),
        (TrainSettings(weights="token", loss="cispo"), "cispo"),
    ],
)
def test_the_exported_rows_give_plain_trl_the_same_loss_and_gradient(
    settings: TrainSettings,
    loss_type: str,
    model: Any,
    model_dir: Path,
    make_trainer: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    calls, rows = _logged(model, tmp_path / "datasets")
    assert len(rows) == 6
    assert sum(0 in row["env_mask"] for row in rows) == 6, "all have tokens of the environment"
    program = _program(model_dir, rows, tmp_path).replace("trainer.train()", "")
    program = program.replace('loss_type="dapo"', f'loss_type="{loss_type}", use_cpu=True, report_to="none"')
    program = program.replace("epsilon_high=0.28", f"epsilon_high={clip_range(settings)[1] - (loss_type != 'cispo')}")
    names: dict[str, Any] = {}
    exec(program, names)
    trl = names["trainer"]
    trl.current_gradient_accumulation_steps = 1
    trl.model.train()
    loss = trl._compute_loss(trl.model, trl._prepare_inputs(rows))
    loss.backward()
    of_trl = float(loss.detach()), gradients(trl.model)
    assert_same(of_trl, measured(make_trainer(settings), one_step(calls, settings)), 1e-5)


@pytest.mark.ci
def test_the_program_of_the_page_trains(model: Any, model_dir: Path, tmp_path: Path) -> None:
    _, rows = _logged(model, tmp_path / "datasets")
    environ = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _program(model_dir, rows, tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (checkpoint,) = (tmp_path / "trained").glob("checkpoint-*")
    assert not same_weights(checkpoint, model_dir)


def test_the_program_of_the_page_refuses_rows_of_several_temperatures(
    model: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    _, rows = _logged(model, tmp_path / "datasets")
    with pytest.raises(AssertionError, match="rows of several temperatures"):
        exec(_program(model_dir, [*rows, {**rows[0], "temperature": 1.0}], tmp_path), {})

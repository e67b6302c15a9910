"""The two programs in docs/training.md that train on a dataset without trainspan run as shown, and learn from it."""

import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch

from tests.support.dataset_files import LoggedCall, write_dataset
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT
from tests.training.support.sessions import same_weights
from trainspan_training.model.loading import load_model

_PROGRAMS = re.findall(
    r"```python\n(.*?)```",
    (ROOT / "docs/training.md").read_text().partition("### Your own trainer")[2].partition("\n## ")[0],
    re.DOTALL,
)


def nll(folder: Path, tokens: list[int]) -> tuple[float, float]:
    """Mean −log π of all tokens but the first, and of the last two."""
    with torch.no_grad():
        logprobs = load_model(folder)(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    losses = -logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return float(losses.mean()), float(losses[-2:].mean())


@pytest.mark.ci
@pytest.mark.parametrize("number", [0, 1])
def test_a_program_of_the_page_trains_on_a_dataset(number: int, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    calls = [LoggedCall(f"r{n}", [5, 6, 7], [8, 9], [-6.0, -6.0], advantage) for n, advantage in enumerate((1.0, -1.0))]
    dataset = write_dataset(tmp_path / "datasets", calls)
    assert pl.read_parquet(dataset).height == 2
    program = _PROGRAMS[number].replace("MODEL_DIR", str(model)).replace("DATASET", str(dataset))
    assert program.count("\n") <= 14
    environ = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    trained = tmp_path / "trained"
    folder = trained if number == 0 else next(trained.glob("checkpoint-*"))
    assert not same_weights(folder, model)
    if number == 1:
        (loss,) = re.findall(r"'train_loss': '([\d.]+)'", done.stdout)
        whole, answer = nll(model, [5, 6, 7, 8, 9])
        assert abs(float(loss) - answer) < 0.5 * abs(whole - answer)  # three steps change it, too

"""Which files of a folder hold a model, and which state belongs to an optimizer."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints.tensor_files import TensorParts
from trainspan_training.model.full_weights import has_slices, load_slices
from trainspan_training.model.optimizer_state import load_optimizer

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(folder: Path) -> dict[str, str]:
    """Tensors `weight` and `bias`, one file each; a third file, not in the index, has others with the same names."""
    save_file({"weight": torch.ones(2, 2)}, folder / ONE)
    save_file({"bias": torch.full((2,), 2.0), "weight": torch.full((2, 2), 7.0)}, folder / TWO)
    save_file({"weight": torch.full((2, 2), 9.0), "consolidated": torch.zeros(1)}, folder / "consolidated.safetensors")
    home = {"weight": ONE, "bias": TWO}
    write_index(folder, home)
    return home


def write_index(folder: Path, home: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))


def test_of_a_model_in_several_files_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    sharded(tmp_path)
    model = torch.nn.Linear(2, 2)
    assert has_slices(model, tmp_path)
    load_slices(model, tmp_path)
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    assert model.bias.tolist() == [2, 2]
    with TensorParts.of_model(tmp_path) as parts:
        assert sorted(parts) == ["bias", "weight"]


def test_of_a_model_in_one_file_no_other_file_is_read(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"weight": torch.zeros(2), "other": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    with TensorParts.of_model(tmp_path) as parts:
        assert {name: parts.whole(name).tolist() for name in parts} == {"weight": [1, 1]}


def test_an_index_that_does_not_fit_its_folder_is_named(tmp_path: Path) -> None:
    home = sharded(tmp_path)
    for wrong, message in (
        (
            {**home, "bias": "model-00003-of-00003.safetensors"},
            "names model-00003-of-00003.safetensors, which does not exist",
        ),
        ({**home, "bias": ONE}, "expects 'bias' in model-00001-of-00002.safetensors, which does not have it"),
        (["weight"], "index.json is damaged"),
    ):
        write_index(tmp_path, wrong)
        with pytest.raises(CheckpointError, match=message):
            TensorParts.of_model(tmp_path)
    write_index(tmp_path, home)
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both model.safetensors and an index of other files"):
        TensorParts.of_model(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'weight' has shape \[1, 2\] on disk, \[2, 2\] in the model"):
        load_slices(torch.nn.Linear(2, 2), tmp_path)


def test_the_state_of_another_model_is_no_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    state = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(3.0)}
    file = tmp_path / "part-00001-of-00001.safetensors"
    save_file({f"bias/{key}": value for key, value in state.items()}, file)
    with caplog.at_level(logging.WARNING):
        load_optimizer(adam, model, [file])
    assert adam.state[model.bias]["step"] == 3
    assert "Adam starts from zero for 1 of 2 tensors" in caplog.text
    save_file({f"other.bias/{key}": value for key, value in state.items()}, file)
    with pytest.raises(CheckpointError, match=r"Adam's state of 1 tensors that are not trained, first 'other.bias'"):
        load_optimizer(adam, model, [file])

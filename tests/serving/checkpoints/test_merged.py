"""Adapters that are added to the full weights, compared with peft's own merge."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.serving.support.servers import Models
from tests.support.models.adapters import make_adapter
from trainspan_schemas.errors import CheckpointError
from trainspan_serving.checkpoints.merged import MergedWeights, check_can_merge
from trainspan_serving.checkpoints.weights import read_weights


def _configure(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_matrices_are_those_of_peft_and_all_others_are_unchanged(
    models: Models, tmp_path: Path, use_rslora: bool
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    make_adapter(models.base, tmp_path / "a", 1, seed=1)
    _configure(tmp_path / "a", use_rslora=use_rslora)
    merged = dict(MergedWeights(models.base, tmp_path / "a").tensors())
    assert merged.keys() == load_file(models.base / "model.safetensors").keys()
    plain = AutoModelForCausalLM.from_pretrained(models.base, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    expected: Any = PeftModel.from_pretrained(plain, str(tmp_path / "a")).merge_and_unload().state_dict()  # type: ignore[operator]
    changed = set()
    for name in merged.keys() & expected.keys():  # the file also has buffers that models compute
        tensor = merged[name]
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
        if not torch.equal(tensor, before[name]):
            changed.add(name.split(".")[-2])
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_weights_without_an_adapter_are_those_of_the_file(models: Models) -> None:
    saved = load_file(models.base / "model.safetensors")
    read = dict(MergedWeights(models.base).tensors())
    assert read.keys() == saved.keys()
    assert all(torch.equal(read[name], saved[name]) for name in saved)


def test_a_merge_into_bfloat16_files_keeps_float32(models: Models, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    make_adapter(models.base, tmp_path / "a", 1, seed=1)
    half = tmp_path / "half"
    half.mkdir()
    saved = {name: tensor.bfloat16() for name, tensor in load_file(models.base / "model.safetensors").items()}
    save_file(saved, half / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    merged = dict(MergedWeights(half, tmp_path / "a").tensors())
    assert merged[name].dtype == torch.float32
    assert merged["model.norm.weight"].dtype == torch.bfloat16
    assert not torch.equal(merged[name], merged[name].bfloat16().float())


def _quantize(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda base, adapter: _configure(adapter, rank_pattern={"q_proj": 2}), "an adapter with rank_pattern"),
        (lambda base, adapter: _configure(adapter, alpha_pattern={"q_proj": 2}), "an adapter with alpha_pattern"),
        (lambda base, adapter: _configure(adapter, fan_in_fan_out=True), "an adapter with fan_in_fan_out"),
        (lambda base, adapter: _quantize(base), "an adapter on quantized weights"),
    ],
)
def test_what_cannot_be_merged_exactly_is_refused(
    models: Models, tmp_path: Path, spoil: Callable[[Path, Path], None], reason: str
) -> None:
    shutil.copytree(models.base, tmp_path / "base")
    make_adapter(models.base, tmp_path / "a", 1, seed=1)
    check_can_merge(tmp_path / "a", read_weights(tmp_path / "base"))
    spoil(tmp_path / "base", tmp_path / "a")
    with pytest.raises(CheckpointError, match=rf"a: {reason} cannot be merged: .*merge_adapters = false"):
        check_can_merge(tmp_path / "a", read_weights(tmp_path / "base"))

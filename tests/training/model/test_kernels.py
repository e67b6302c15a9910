"""What makes layers fast on a GPU gives the gradient of the plain layers, in one model alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tiny_model import make_tiny_model
from trainspan_training.model.kernels import fusible, round_residual
from trainspan_training.model.loading import load_model

ROOT = Path(__file__).parents[3]


@pytest.mark.ci
def test_layers_with_ligers_kernels_give_the_gradient_of_plain_ones_and_leave_other_models_alone() -> None:
    """Liger's own kernels in Triton's interpreter, which knows float16 and not bfloat16; norms' weights stay float32.

    In float16 both are off by 6e-4 to 8e-4.
    """
    command = [sys.executable, "-m", "tests.training.support.fused_layers"]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    models = [json.loads(line) for line in done.stdout.splitlines()]
    assert [model["kind"] for model in models] == ["llama", "mistral", "qwen2", "qwen3"]
    for model in models:
        assert model["fused"] >= 2 * 3, "two norms and a gated product in each layer"
        assert model["float32"] < 2e-6, model
        assert model["float16"] < 1.25 * model["float16_plain"], model
        assert model["left_alone"], model


def test_the_residual_stream_is_rounded_as_in_the_server(tmp_path: Path) -> None:
    model: Any = load_model(make_tiny_model(tmp_path))
    dtypes: list[torch.dtype] = []
    model.model.layers[1].register_forward_pre_hook(lambda _module, inputs: dtypes.append(inputs[0].dtype))
    tokens = torch.tensor([[3, 4, 5]])
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
        round_residual(model)
        model(tokens)
    assert dtypes == [torch.float32, torch.bfloat16]


def test_models_with_other_layers_keep_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

    monkeypatch.setattr("trainspan_training.model.kernels.importlib.util.find_spec", lambda _: True)
    assert [fusible(config()) for config in (LlamaConfig, Gemma3TextConfig, GPT2Config)] == [True, False, False]
    assert not fusible(LlamaConfig(hidden_act="relu")), "Liger would make it another function"
    monkeypatch.setattr("trainspan_training.model.kernels.importlib.util.find_spec", lambda _: None)
    assert not fusible(LlamaConfig()), "without Liger no layer is fused"

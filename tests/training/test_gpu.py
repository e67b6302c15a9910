"""What only a GPU shows: compiled flex attention with its gradient, bfloat16, and whether the estimate of memory is enough."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import accelerator
from tests.support.dataset_files import sample_rollouts, write_dataset
from tests.training.references import as_calls, assert_same, measured, mixed_rollouts, reference
from tests.training.sessions import GENTLE, Run
from trainspan_schemas.settings import TrainSettings
from trainspan_training import attention
from trainspan_training.batches import Limits
from trainspan_training.forwarding import Forwarding
from trainspan_training.loss_weights import find_rule
from trainspan_training.model import load_model, load_tokenizer
from trainspan_training.plan import plan_steps
from trainspan_training.rows import make_rows
from trainspan_training.trainer import TransitionGRPOTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def test_compiled_flex_attention_gives_loss_and_gradient_of_the_reference(
    model_dir: Path, model: Any, tmp_path: Path
) -> None:
    """In float32: one tree, padded to whole blocks, against a plain forward pass for each call on the CPU."""
    settings = TrainSettings(forward="tree", gradient_checkpointing=False)
    logged = mixed_rollouts(model)
    calls = as_calls(logged)
    (step,) = plan_steps(
        make_rows(calls, merge=True),
        calls,
        steps=1,
        rule=find_rule(settings),
        forwarding=Forwarding("tree", Limits(16384), pair=0.0, dense=False),
        rng=np.random.default_rng(0),
    )
    flexible = load_model(model_dir)
    attention.prepare(flexible, "tree", dense=False)
    trainer = TransitionGRPOTrainer(
        flexible, load_tokenizer(model_dir), replace(settings, dtype="float32"), [], str(tmp_path)
    )
    assert trainer.accelerator.device.type == "cuda"
    loss, gradient = measured(trainer, step)
    found = loss, {name: value.cpu() for name, value in gradient.items()}
    assert_same(found, reference(load_model(model_dir), logged, settings), 1e-4)


def test_a_round_in_bfloat16_keeps_float32_weights_and_stays_near_the_sampler(
    run: Run, tmp_path: Path, model: Any
) -> None:
    write_dataset(tmp_path / "dataset", sample_rollouts(model, rollouts=8, turns=2), round_=0)
    (result,) = run(GENTLE)
    assert result.error is None
    assert result.record is not None
    assert 1e-6 < result.record.logp_diff_max < 0.1
    saved = load_file(tmp_path / "checkpoints/policy-000001/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_the_estimate_of_memory_is_not_less_than_what_training_takes() -> None:
    size = accelerator.Size(hidden=1024, layers=8, heads=16, key_heads=4, inner=4096, vocabulary=32_000)
    for forward in ("padded", "tree"):
        figures = accelerator.run(size, accelerator.WORK, forward, cuda=True)
        assert 0.3 * figures["estimated_gib"] < figures["peak_gib"] < figures["estimated_gib"]

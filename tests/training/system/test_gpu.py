"""GPU-only checks: compiled flex attention with its gradient, bfloat16, and a sufficient memory estimate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.support.workload import Workload
from benchmarks.training import accelerator
from tests.support.dataset_files import LoggedCall, sample_rollouts, write_dataset
from tests.training.support.exactness.references import as_calls, assert_same, measured, mixed_rollouts, reference
from tests.training.support.sessions import GENTLE, Run
from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.gpus import installed_gpus
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.loss_weights import find_rule
from trainspan_training.data.sequences import make_sequences
from trainspan_training.data.steps import Step, plan_steps
from trainspan_training.model.kernels import accelerate_layers
from trainspan_training.model.loading import load_model, load_tokenizer
from trainspan_training.objective import attention
from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not installed_gpus().names, reason="no NVIDIA GPU is here"),
]


@pytest.mark.parametrize("mode", ["packed", "tree"])
@pytest.mark.parametrize("chunk", [2**26, 1000])
def test_compiled_flex_attention_gives_loss_and_gradient_of_the_reference(
    model_dir: Path, model: Any, tmp_path: Path, mode: str, chunk: int
) -> None:
    """In float32: one sequence, padded to whole blocks, against a plain forward pass per call on the CPU."""
    settings = TrainSettings(forward=mode, gradient_checkpointing=False)
    logged = mixed_rollouts(model)
    trainer = flexible_trainer(model_dir, settings, tmp_path, bf16=False)
    trainer.scorer.chunk = chunk
    loss, gradient = measured(trainer, one_sequence(logged, settings))
    found = loss, {name: value.cpu() for name, value in gradient.items()}
    assert_same(found, reference(load_model(model_dir), logged, settings), 1e-4)


def test_a_block_mask_is_made_without_all_pairs_in_memory() -> None:
    """For 32,768 tokens: 2^30 pairs, a byte each, would be 1 GiB."""
    ends = torch.arange(1024, 32_769, 1024, device="cuda").repeat_interleave(1024)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.block_mask(ends)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


def flexible_trainer(model_dir: Path, settings: TrainSettings, folder: Path, *, bf16: bool) -> Any:
    settings = replace(settings, dtype="bfloat16" if bf16 else "float32")
    flexible = accelerate_layers(load_model(model_dir), bf16=bf16)
    assert attention.prepare(flexible, settings.forward)
    trainer = TransitionGRPOTrainer(flexible, load_tokenizer(model_dir), settings, [], str(folder))
    assert trainer.accelerator.device.type == "cuda"
    return trainer


def one_sequence(logged: list[LoggedCall], settings: TrainSettings) -> Step:
    calls = as_calls(logged)
    rows = make_sequences(calls, merge=True)
    (step,) = plan_steps(
        rows,
        calls,
        steps=1,
        rule=find_rule(settings),
        layout=BatchLayout(settings.forward, 16384, pair=0.0, blocks=True),
        rng=np.random.default_rng(0),
    )
    return step.build(rows)


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


def test_the_estimate_of_memory_is_not_less_than_what_training_reserves() -> None:
    size = accelerator.Size(hidden=1024, layers=8, heads=16, key_heads=4, inner=4096, vocabulary=32_000)
    for forward in ("padded", "packed", "tree"):
        assert_within_estimate(accelerator.run(size, accelerator.WORK, forward, cuda=True))


def test_rows_of_16k_tokens_with_a_vocabulary_of_152k_train_within_the_estimate() -> None:
    size = accelerator.Size(hidden=1536, layers=4, heads=12, key_heads=2, inner=8960, vocabulary=151_936)
    long = Workload(groups=2, group=1, turns=1, prompt=256, sampled=16_128, observed=0)
    assert_within_estimate(accelerator.run(size, long, "packed", cuda=True))


def assert_within_estimate(figures: dict[str, Any]) -> None:
    assert 0.3 * figures["estimated_gib"] < figures["peak_gib"] <= figures["reserved_gib"] < figures["estimated_gib"]

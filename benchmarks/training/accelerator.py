"""Training at the size of real models with random weights: on one GPU in bfloat16 with compiled flex attention, else small on the CPU.

An optimizer step of 64 rollouts (8 of each of 8 tasks, 6 turns, prompt/completion/observation 1024/128/128) runs in the
trainer's loop as padded rows, as packed ones and as prefix trees: forwarded and trained tokens per second, the share of the
device's peak, and the peak memory beside the estimate. `python -m benchmarks accelerator` stores them with the hardware's name.
"""

import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.support.workload import Workload
from tests.support.models.tiny_model import make_tiny_model
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.devices.cores import prepare_process
from trainspan_training.model.loading import load_tokenizer
from trainspan_training.objective.heavy_imports import import_training

__all__ = ["SIZES", "SMALL", "SMALL_WORK", "WORK", "Size", "make_model", "measure", "operations", "run"]

WARM, MEASURED = 2, 3
"""Number of warm-up steps (with compilation), and of measured ones."""

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}
"""Floating-point operations per second, bfloat16 without sparsity, by a part of the device's name; from the vendors' data sheets."""


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a Qwen2 model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int


SIZES = {
    "0.5B": Size(896, 24, 14, 2, 4864, 151_936),
    "1.5B": Size(1536, 28, 12, 2, 8960, 151_936),
}
SMALL = {"small": Size(64, 2, 4, 2, 256, 512)}
WORK = Workload(groups=8, group=8, turns=6, prompt=1024, sampled=128, observed=128)
SMALL_WORK = Workload(groups=2, group=4, turns=3, prompt=48, sampled=8, observed=8)


def measure() -> dict[str, Any]:
    """Figures by model size and forward mode; medians over the measured steps."""
    prepare_process()
    import_training()
    import torch

    cuda = torch.cuda.is_available()
    figures: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "dtype": "bfloat16" if cuda else "float32",
        "torch": torch.__version__,
    }
    for name, size in (SIZES if cuda else SMALL).items():
        for forward in ("padded", "packed", "tree"):
            figures[f"{name}_{forward}"] = run(size, WORK if cuda else SMALL_WORK, forward, cuda=cuda)
        loss = figures[f"{name}_padded"]["loss"]
        for forward in ("packed", "tree"):
            figures[f"{name}_{forward}"]["loss_off_padded"] = abs(figures[f"{name}_{forward}"]["loss"] / loss - 1)
    return figures


def run(size: Size, work: Workload, forward: Any, *, cuda: bool) -> dict[str, Any]:
    """Runs one step several times in the trainer's loop; seconds are wall time."""
    import numpy as np
    import torch

    from tests.training.support.exactness.references import as_calls
    from trainspan_training.data.layout import batch_layout
    from trainspan_training.data.loss_weights import find_rule
    from trainspan_training.data.sequences import make_sequences
    from trainspan_training.data.steps import plan_steps
    from trainspan_training.devices.team import Team
    from trainspan_training.model.kernels import accelerate_layers
    from trainspan_training.objective import attention, memory
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    settings = TrainSettings(forward=forward, old_policy="logged", learning_rate=1e-9, max_kl=1e9, max_ratio=1e30)
    torch.manual_seed(0)
    config = config_of(size)
    free = memory.available(settings, cuda=cuda)
    budget = memory.fit(config, settings, free, cuda=cuda, team=Team())
    settings = replace(settings, gradient_checkpointing=budget.kept < budget.longest)
    model = accelerate_layers(make_model(size), bf16=True) if cuda else make_model(size)
    layout = batch_layout(settings, config, cuda=cuda, budget=budget)
    attention.prepare(model, forward)
    calls = as_calls(
        work.calls(size.vocabulary), group=lambda call: str(int(call.rollout_id.rsplit("-", 1)[1]) // work.group)
    )
    rows = make_sequences(calls, merge=True)
    (step,) = plan_steps(
        rows,
        calls,
        steps=1,
        rule=find_rule(settings),
        layout=layout,
        rng=np.random.default_rng(0),
    )
    step = step.build(rows)
    began: list[float] = []

    def steps() -> Iterator[list[Any]]:
        for _ in range(WARM + MEASURED + 1):
            if cuda:
                torch.cuda.synchronize()
            began.append(time.perf_counter())
            if len(began) <= WARM + MEASURED:
                yield list(step.micro_batches)
        trainer.control.should_training_stop = True

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(make_tiny_model(Path(folder), hidden=32))  # required by TRL
        trainer = TransitionGRPOTrainer(model, tokenizer, settings, steps(), folder, budget=budget)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    losses = [stats.loss for stats in trainer.take_stats()]
    seconds = statistics.median(
        later - earlier for earlier, later in zip(began[WARM:-1], began[WARM + 1 :], strict=True)
    )
    chosen = replace(settings, micro_batch_tokens=budget.tokens, gradient_checkpointing=budget.tokens > budget.kept)
    work_done = operations(size, step.micro_batches, step.trained)
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds_per_step": round(seconds, 4),
        "micro_batches": len(step.micro_batches),
        "branched": step.micro_batches[0].branches is not None,
        "trained_tokens": step.trained,
        "forwarded_tokens": step.forwarded,
        "unique_tokens": step.unique,
        "forwarded_tokens_per_second": round(step.forwarded / seconds),
        "trained_tokens_per_second": round(step.trained / seconds),
        "micro_batch_tokens": budget.tokens,
        "recomputed": chosen.gradient_checkpointing,
        "estimated_gib": round(memory.estimate(config, chosen, cuda=cuda, logits=budget.logits).total / 2**30, 2),
        "loss": losses[0],
    }
    if cuda:
        peak = next((value for part, value in PEAKS.items() if part in torch.cuda.get_device_name()), None)
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        figures["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        figures["share_of_peak"] = round(work_done / seconds / peak, 4) if peak else None
    return figures


def operations(size: Size, batches: Sequence[Any], trained: int) -> float:
    """Floating-point operations of a step, three times its forward pass; recomputation does not count.

    Layers: two for each weight and token. Head: on trained positions. Attention: scores and values of the attended pairs.
    """
    head = size.hidden // size.heads
    attention = size.hidden * (2 * size.hidden + 2 * size.key_heads * head)
    layer = attention + 3 * size.hidden * size.inner
    tokens = sum(batch.n_tokens for batch in batches)
    pairs = sum(_pairs(batch) for batch in batches)
    forward = 2 * size.layers * layer * tokens + 2 * size.hidden * size.vocabulary * trained
    return 3.0 * (forward + 4 * size.layers * size.hidden * pairs)


def _pairs(batch: Any) -> int:
    """Pairs of tokens with attention between them; rows count with their padded length."""
    if batch.branches is not None:
        return int((batch.branches.depths[: batch.n_tokens] + 1).sum())
    rows, width = batch.tokens.shape
    return int(rows * width * (width + 1) // 2)


def make_model(size: Size) -> Any:
    """Creates a model with random weights, on the GPU if there is one."""
    import torch
    from transformers import Qwen2ForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return Qwen2ForCausalLM(config_of(size))


def config_of(size: Size) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )

"""The memory estimate against the kernel's count of the memory that forward and backward passes take."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.training.accelerator import Size, config_of, make_model
from tests.training.data.test_filling import row_of
from tests.training.support.memory_use import peak
from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.layout import BatchLayout
from trainspan_training.data.micro_batches import WeightedRow, make_batches
from trainspan_training.model.loading import load_tokenizer
from trainspan_training.objective import attention
from trainspan_training.objective.memory import estimate

LARGE_VOCABULARY = Size(hidden=32, layers=2, heads=2, key_heads=1, inner=64, vocabulary=151_936)
WIDE = Size(hidden=256, layers=4, heads=4, key_heads=2, inner=1024, vocabulary=512)
WIDE_HEADS = Size(hidden=128, layers=4, heads=4, key_heads=2, inner=384, vocabulary=512)
"""With heads of twice the model's width, as Qwen3-0.6B has."""
NARROW = Size(hidden=64, layers=2, heads=2, key_heads=1, inner=128, vocabulary=512)


def with_wide_heads(size: Size) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    known = config_of(size).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = Qwen3Config(
        **{name: known[name] for name in (*names, "num_key_value_heads", "tie_word_embeddings")},
        head_dim=2 * size.hidden // size.heads,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("size", "mode", "tokens", "checkpointing", "dtype"),
    [
        (LARGE_VOCABULARY, "padded", 256, False, "float32"),
        (WIDE, "packed", 1024, False, "float32"),
        (WIDE, "tree", 1024, False, "float32"),
        (NARROW, "tree", 8192, False, "float32"),
        (WIDE, "packed", 1024, True, "float32"),
        (WIDE_HEADS, "packed", 4096, False, "float32"),
        (WIDE_HEADS, "tree", 4096, True, "float32"),
        (LARGE_VOCABULARY, "packed", 1024, False, "bfloat16"),
        (WIDE, "tree", 2048, False, "bfloat16"),
        (WIDE, "tree", 2048, True, "bfloat16"),
        (WIDE_HEADS, "tree", 4096, True, "bfloat16"),
    ],
)
def test_a_micro_batch_takes_what_was_estimated_and_no_more(
    size: Size, mode: str, tokens: int, checkpointing: bool, dtype: str, model_dir: Path, tmp_path: Path
) -> None:
    """Gradients, activations and logits of a full one; the weights are already in memory.

    A mask of 8,192 tokens would take 256 MiB more. The estimate leaves room for what an allocator keeps: 0.25 of it
    at most in four runs; where layers are recomputed, models this small take a fifth to two fifths of theirs.
    """
    from trainspan_training.objective.grpo_trainer import TransitionGRPOTrainer

    settings = TrainSettings(micro_batch_tokens=tokens, forward=mode, gradient_checkpointing=checkpointing, dtype=dtype)
    model: Any = with_wide_heads(size) if size is WIDE_HEADS else make_model(size)
    assert attention.prepare(model, mode)
    rng = np.random.default_rng(0)
    rows = [row_of(index, tokens // 4, rng, vocabulary=size.vocabulary, trained=tokens // 4 - 1) for index in range(4)]
    for item in rows:
        item.tokens[:16] = 7  # the prefix that the tree shares
    cuts = BatchLayout(mode, tokens, pair=0.0, blocks=False).micro_batches(rows)
    weighted = [WeightedRow(row, np.ones(row.n_trained)) for row in rows]
    (batch,) = make_batches(cuts, weighted, sum(row.n_trained for row in rows))
    trainer = TransitionGRPOTrainer(model, load_tokenizer(model_dir), settings, [], str(tmp_path))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # as `train()` does
    prepared = trainer.accelerator.prepare(model)  # as `train()` does: it converts outputs
    small = batch.first(tokens // 4)

    def warm_up() -> None:  # one-time allocations
        trainer.accumulate(prepared, [small])
        model.zero_grad(set_to_none=True)

    taken = peak(lambda: trainer.accumulate(prepared, [batch]), warm_up=warm_up)
    found = estimate(model.config, settings, cuda=False)
    estimated = found.gradients + found.activations + found.logits + found.masks
    least = 0.15 if checkpointing else 0.4
    assert least * estimated < taken < 0.9 * estimated, f"{taken / 2**20:.0f} of {estimated / 2**20:.0f} MiB ({found})"

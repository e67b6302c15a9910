"""Loaded models compute the same in training as the server does: without dropout, and with soft caps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainspan_schemas.config.settings import TrainSettings
from trainspan_schemas.errors import CheckpointError
from trainspan_training.model.loading import hollow_model, load_config, load_model
from trainspan_training.objective import attention
from trainspan_training.objective.memory import estimate

SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
GEMMA: dict[str, Any] = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
TOKENS = torch.arange(3, 15).unsqueeze(0)


def written(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0)  # larger scores, so that a cap matters
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["seed_oss", "opt", "bloom", "falcon", "gpt2"])
def test_a_model_in_training_has_no_dropout(kind: str, tmp_path: Path) -> None:
    """Some keep it as a layer, some as a number that a function takes."""
    from transformers import BloomConfig, FalconConfig, GPT2Config, OPTConfig, SeedOssConfig

    shared: Any = {**SHAPE, "hidden_dropout": 0.5, "attention_dropout": 0.5}
    config: Any = {
        "seed_oss": lambda: SeedOssConfig(**GEMMA, attention_dropout=0.5, residual_dropout=0.5),
        "opt": lambda: OPTConfig(**SHAPE, ffn_dim=32, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5),
        "bloom": lambda: BloomConfig(**shared),
        "falcon": lambda: FalconConfig(**shared),
        "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=2, resid_pdrop=0.5, attn_pdrop=0.5),
    }[kind]()
    model = load_model(written(config, tmp_path))
    with torch.no_grad():
        assert torch.equal(model.train()(TOKENS).logits, model.eval()(TOKENS).logits)


@pytest.mark.parametrize("kind", ["Gemma2Config", "VaultGemmaConfig"])
def test_soft_caps_of_attention_are_applied(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = written(getattr(transformers, kind)(**GEMMA, attn_logit_softcapping=0.5), tmp_path)
    model = load_model(folder).eval()
    assert not attention.prepare(model, "auto")
    assert hollow_model(load_config(folder)).config._attn_implementation == "eager"
    with torch.no_grad():
        capped = model(TOKENS).logits
        model.set_attn_implementation("sdpa")
        assert (model(TOKENS).logits - capped).abs().max() > 0.01, "PyTorch's own attention ignores the cap"
        model.set_attn_implementation("eager")
        assert torch.equal(model(TOKENS).logits, capped)


def test_a_row_of_a_model_for_long_contexts_does_not_depend_on_the_rows_beside_it(tmp_path: Path) -> None:
    from transformers import Phi3Config

    rope: Any = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
    config = Phi3Config(
        **{**GEMMA, "num_key_value_heads": 2},
        partial_rotary_factor=1.0,
        pad_token_id=0,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={**rope, "original_max_position_embeddings": 16},
    )
    model = load_model(written(config, tmp_path)).eval()
    with torch.no_grad():
        alone = model(TOKENS[:, :10]).logits
        padded = model(torch.cat([TOKENS[:, :10], torch.zeros(1, 10, dtype=torch.long)], dim=1)).logits[:, :10]
    assert (alone - padded).abs().max() < 1e-3


def test_rotations_that_keep_state_between_passes_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**{**GEMMA, "head_dim": 16}, max_position_embeddings=16, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="rotary embeddings of type dynamic"):
        load_config(tmp_path)


def test_the_scores_of_capped_attention_take_memory(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    config = load_config(written(Gemma2Config(**GEMMA, attn_logit_softcapping=0.5), tmp_path))
    few, many = (
        estimate(config, TrainSettings(micro_batch_tokens=size, gradient_checkpointing=False), cuda=False)
        for size in (1024, 2048)
    )
    scores = 16 * 2 * (2048**2 - 2 * 1024**2)  # two heads
    assert many.activations - 2 * few.activations == 2 * scores  # two layers

"""LoRA adapters on a tiny model, created by peft, as checkpoints with a canary from peft's own forward pass."""

from pathlib import Path
from typing import Any

from tests.support.models.canary import canary_tokens
from trainspan_schemas.artifacts.checkpoint import Canary, CanaryPrompt, CheckpointMeta

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    base: Path, folder: Path, version: int, *, seed: int, rank: int = 4, parent: Path | None = None, scale: float = 1.0
) -> Any:
    """Writes an adapter with random weights and its canary; returns the peft model for `adapter_logprobs`.

    `scale` multiplies what it adds to each layer's output.

    The canary's parent log-probabilities are those of `base`, or of the adapter in `parent`.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), init_lora_weights=False)
    model = get_peft_model(_load(base), config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "lora_B" in name:
                weights.mul_(scale)
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    CheckpointMeta("lora", version, base.name, str(base), None).write(folder)
    earlier = _load(base) if parent is None else load_adapter(base, parent)
    prompts = [
        CanaryPrompt(
            prompt,
            completion,
            adapter_logprobs(model, prompt, completion),
            adapter_logprobs(earlier, prompt, completion),
        )
        for prompt, completion in canary_tokens()
    ]
    Canary("float32", prompts).write(folder)
    return model


def load_adapter(base: Path, folder: Path) -> Any:
    """Loads the full model with the adapter on it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(_load(base), str(folder)).eval()


def adapter_logprobs(model: Any, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
    """Returns (C,) log-probabilities of `completion_ids` after `prompt_ids`, from a float32 pass at temperature 1."""
    import torch

    with torch.inference_mode():
        logits = model.eval()(torch.tensor([prompt_ids + completion_ids])).logits[0]
    rows = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
    scores: list[float] = rows[torch.arange(len(completion_ids)), torch.tensor(completion_ids)].tolist()
    return scores


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

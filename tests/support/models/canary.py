"""Writes a checkpoint's `trainspan.json` and `canary.json`, with transformers as the trainer."""

import functools
from pathlib import Path
from typing import Any

from trainspan_schemas.artifacts.checkpoint import Canary, CanaryPrompt, CheckpointMeta


@functools.cache
def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs_of(folder: Path, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
    """Returns (C,) log-probabilities of `completion_ids` after `prompt_ids`, from a float32 pass at temperature 1."""
    import torch

    model = _load(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_ids + completion_ids])).logits[0]
    rows = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
    scores: list[float] = rows[torch.arange(len(completion_ids)), torch.tensor(completion_ids)].tolist()
    return scores


def greedy_ids(folder: Path, prompt_ids: list[int], count: int) -> list[int]:
    """Returns `count` greedily decoded tokens after `prompt_ids`, ignoring the end of the turn."""
    import torch

    model = _load(folder)
    ids = list(prompt_ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


def canary_tokens(prompt_tokens: int = 300, completion_tokens: int = 64) -> list[tuple[list[int], list[int]]]:
    """Returns three prompts longer than two cache blocks, each with its completion."""
    pairs = []
    for number in range(3):
        ids = [(7 * number + 11 * position) % 250 + 5 for position in range(prompt_tokens + completion_tokens)]
        pairs.append((ids[:prompt_tokens], ids[prompt_tokens:]))
    return pairs


def write_checkpoint_files(folder: Path, version: int, parent: Path) -> None:
    """Adds metadata and a canary of three prompts to a model folder, with the parent's weights in `parent`."""
    CheckpointMeta("full", version, parent.name, str(parent), None).write(folder)
    prompts = []
    for prompt, completion in canary_tokens():
        prompts.append(
            CanaryPrompt(
                prompt, completion, logprobs_of(folder, prompt, completion), logprobs_of(parent, prompt, completion)
            )
        )
    Canary("float32", prompts).write(folder)

"""The canary: fixed sequences whose log-probabilities tell these weights from their parent's.

A policy server proves with it, after a swap, that it really serves the new weights (no stale prefix cache, no old
output head). Prompts are longer than two blocks of a prefix cache where the context allows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainspan_schemas.checkpoint import Canary, CanaryPrompt
from trainspan_training.data.sequences import TokenSequence
from trainspan_training.objective.logprobs import score

__all__ = ["draw_prompts", "make_canary", "score_prompts"]

PROMPTS = 3
COMPLETION = 64
_BLOCK = 128  # the longest prefix-cache block in use: vLLM's on a CPU

Prompt = tuple[list[int], list[int]]
"""Prompt ids (P,) and completion ids (C,)."""


def draw_prompts(rows: Sequence[TokenSequence], context: int, seed: int) -> list[Prompt]:
    """Three sequences cut from the rows' tokens put end to end, as long as `context` tokens allow.

    A server scores a sequence by generating one token after it, so that P + C < context.
    """
    rng = np.random.default_rng(seed)
    completion = max(1, min(COMPLETION, (context - 1) // 4))
    prompts = []
    for index in range(PROMPTS):
        length = min(2 * _BLOCK + 4 + 32 * index, context - 1 - completion)
        order = rng.permutation(len(rows))
        pieces: list[int] = []
        while len(pieces) < length + completion:
            for row in order:
                pieces += rows[row].tokens.tolist()
                if len(pieces) >= length + completion:
                    break
        prompts.append((pieces[:length], pieces[length : length + completion]))
    return prompts


@torch.no_grad()
def score_prompts(model: Any, prompts: Sequence[Prompt], dtype: str) -> list[list[float]]:
    """Log-probabilities (C,) of each completion, at temperature 1, under the weights as they are now, computed in `dtype`.

    In the server's dtype matrices are rounded as it rounds them, so that an update too small for it is none here either.
    """
    model.eval()
    device = next(model.parameters()).device
    lower = torch.autocast(device.type, dtype=getattr(torch, dtype), enabled=dtype != "float32")
    scored = []
    for prompt, completion in prompts:
        tokens = torch.tensor([prompt + completion], device=device)
        predicting = torch.arange(len(prompt) - 1, tokens.shape[1] - 1, device=device)
        temperatures = torch.ones(len(completion), device=device)
        with lower:
            scores = score(
                model,
                model,
                tokens,
                predicting,
                tokens[0, len(prompt) :],
                temperatures,
            )
        scored.append(scores.logprobs.tolist())
    return scored


def make_canary(prompts: Sequence[Prompt], new: list[list[float]], parent: list[list[float]], dtype: str) -> Canary:
    """`canary.json` of a checkpoint, of scores that were computed in `dtype`."""
    return Canary(
        dtype=dtype,
        prompts=[
            CanaryPrompt(prompt, completion, logprobs_new, logprobs_parent)
            for (prompt, completion), logprobs_new, logprobs_parent in zip(prompts, new, parent, strict=True)
        ],
    )

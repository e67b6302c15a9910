"""The canary: fixed sequences with log-probabilities that distinguish these weights from their parent's.

After a swap, a policy server uses it to verify that it really serves the new weights (no stale prefix cache, no old
output head). Requests wait while the server computes the sequences, so they are short.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainspan_schemas.artifacts.checkpoint import Canary, CanaryPrompt
from trainspan_schemas.errors import CheckpointError
from trainspan_training.data.sequences import TokenSequence
from trainspan_training.devices.team import Team
from trainspan_training.model.starting_policy import Policy
from trainspan_training.objective.logprobs import score

__all__ = ["CanaryKeeper", "Prompt", "draw_prompts", "make_canary", "score_prompts"]

SEQUENCES = 3
PROMPT_TOKENS = 24
COMPLETION_TOKENS = 64

Prompt = tuple[list[int], list[int]]
"""Prompt ids (P,) and completion ids (C,)."""


def draw_prompts(rows: Sequence[TokenSequence], context: int, seed: int) -> list[Prompt]:
    """Cuts three sequences from the rows' concatenated tokens, shorter if `context` is.

    A server scores a sequence by generating one more token, so P + C < context.
    """
    rng = np.random.default_rng(seed)
    completion = max(1, min(COMPLETION_TOKENS, (context - 1) // 2))
    length = min(PROMPT_TOKENS, context - 1 - completion)
    prompts = []
    for _ in range(SEQUENCES):
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
    """Log-probabilities (C,) of each completion, at temperature 1, under the current weights, computed in `dtype`.

    In the server's dtype matrices are rounded as on the server, so that an update too small to show there has no effect
    here.
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
            scores = score(model, model, tokens, predicting, tokens[0, len(prompt) :], temperatures)
        scored.append(scores.logprobs.tolist())
    return scored


def make_canary(prompts: Sequence[Prompt], new: list[list[float]], parent: list[list[float]], dtype: str) -> Canary:
    """`canary.json` of a checkpoint, from scores computed in `dtype`."""
    return Canary(
        dtype=dtype,
        prompts=[
            CanaryPrompt(prompt, completion, logprobs_new, logprobs_parent)
            for (prompt, completion), logprobs_new, logprobs_parent in zip(prompts, new, parent, strict=True)
        ],
    )


class CanaryKeeper:
    """The canary sequences of a run, and their scores under the newest good weights."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._prompts: list[Prompt] = []
        self._scores: list[list[float]] = []
        self._dtype = ""

    def ready(
        self, model: Any, policy: Policy, drawn: list[Prompt], *, trainer_dtype: str, server_dtype: str | None
    ) -> None:
        """Prepares the sequences and their scores under the current weights; a run keeps the same sequences.

        They come from the policy's checkpoint, or are those `drawn` from the first dataset. They are scored in the
        trainer's dtype, or in the server's if that is coarser.
        """
        dtype = server_dtype if trainer_dtype == "float32" and server_dtype else trainer_dtype
        if self._dtype == dtype:
            return
        if not self._prompts:
            self._prompts = self._team.share(lambda: _known_prompts(policy) or drawn)
        self._dtype = dtype
        self._scores = self.score(model)

    @property
    def scores(self) -> list[list[float]]:
        """Scores of the newest good weights."""
        return self._scores

    def forget(self) -> None:
        """The weights are others: `ready` scores them."""
        self._dtype = ""

    def score(self, model: Any) -> list[list[float]]:
        """Scores under the current weights."""
        return score_prompts(model, self._prompts, self._dtype)

    def canary(self, scores: list[list[float]]) -> Canary:
        """`canary.json` of the weights with these scores."""
        return make_canary(self._prompts, scores, self._scores, self._dtype)

    def accept(self, scores: list[list[float]]) -> None:
        """Makes the weights with these scores the newest good ones."""
        self._scores = scores


def _known_prompts(policy: Policy) -> list[Prompt]:
    """Canary sequences of the policy's checkpoint; empty if it has no canary."""
    try:
        return [(prompt.prompt_ids, prompt.completion_ids) for prompt in Canary.read(policy.folder).prompts]
    except CheckpointError:
        return []

"""Log-probabilities of a model at chosen tokens, with the output head on these positions only."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Scores", "score"]


class Scores(NamedTuple):
    """Of N tokens."""

    logprobs: Tensor
    """(N,) natural logarithm, of softmax(logits / temperature)."""
    entropies: Tensor
    """(N,) of the same distributions, without gradient."""


def score(
    model: nn.Module,
    head: nn.Module,
    tokens: Tensor,
    predicting: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    attention: Mapping[str, Any] | None = None,
) -> Scores:
    """Scores `targets` (N,) at `temperatures` (N,), each predicted at the flat position `predicting` (N,) of `tokens` (B, T).

    `model` is what is called (it may wrap the module that owns the output head `head`). Without `attention` rows are
    padded on the right and attention is causal, so that no token sees padding and no mask is needed.
    """
    with _only_at(head, predicting):
        logits = model(input_ids=tokens, use_cache=False, **(attention or {})).logits.squeeze(0)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    logits = logits / temperatures.unsqueeze(1)
    logsumexp = logits.logsumexp(dim=1)
    logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logsumexp
    with torch.no_grad():
        entropies = torch.special.entr((logits - logsumexp.unsqueeze(1)).exp_()).sum(dim=1)
    return Scores(logprobs, entropies)


@contextmanager
def _only_at(head: nn.Module, positions: Tensor) -> Iterator[None]:
    """Within the block the head gets the hidden states (B, T, H) of these flat positions only, as (1, N, H)."""

    def select(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1).index_select(0, positions).unsqueeze(0), *rest)

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()

"""Log-probabilities of a model at chosen tokens, with the output head on these positions only."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainspan_training.data.token_limits import Limits
from trainspan_training.objective.head import CHUNK, Traced, head_scores

__all__ = ["Scores", "score"]


class Scores(NamedTuple):
    """Of N tokens."""

    logprobs: Tensor
    """(N,) natural logarithm, of softmax(logits / temperature), over the tokens that may come."""
    entropies: Tensor
    """(N,) of the same distributions, without gradient."""


def score(
    model: nn.Module,
    owner: Any,
    tokens: Tensor,
    predicting: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    attention: Mapping[str, Any] | None = None,
    *,
    limits: Limits | None = None,
    chunk: int = CHUNK,
) -> Scores:
    """Scores `targets` (N,) at `temperatures` (N,), each predicted at the flat position `predicting` (N,) of `tokens` (B, T).

    `model` is what is called, `owner` the language model that it may wrap. Without `attention` rows are padded on the right
    and attention is causal, so that no token sees padding and no mask is needed. `limits` are those of the N targets.
    `chunk` logits exist at a time; scores have the type of `temperatures`.
    """
    with _chunked(owner, predicting, targets, temperatures, limits, chunk):
        scores: Scores = model(input_ids=tokens, use_cache=False, **(attention or {}))
    return scores


@contextmanager
def _chunked(
    owner: Any, positions: Tensor, targets: Tensor, temperatures: Tensor, limits: Limits | None, chunk: int
) -> Iterator[None]:
    """Within the block the model's output is the scores instead of logits.

    The head is kept from what the model would give it and gets no position; its real work is done in chunks where the model
    is left, before what wraps the model (FSDP) lets go of the head's weights.
    """
    head: nn.Module = owner.get_output_embeddings()
    kept: list[Tensor] = []

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        kept.append(hidden.flatten(0, 1).index_select(0, positions))
        return (hidden[:, :0], *rest)

    def trace(_: nn.Module, __: Any, logits: Tensor) -> Traced:
        return logits.as_subclass(Traced)

    def finish(_: nn.Module, __: Any, output: Any) -> Scores:
        for hook in hooks[:2]:
            hook.remove()
        after = output.logits
        assert isinstance(after, Traced), "the model's logits come from its head"
        rows = max(1, chunk // after.shape[-1])
        return Scores(*head_scores(head, after, kept.pop(), targets, temperatures, rows, limits))

    hooks = [
        head.register_forward_pre_hook(take),
        head.register_forward_hook(trace),
        owner.register_forward_hook(finish, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

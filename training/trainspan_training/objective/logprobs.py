"""Log-probabilities of a model at chosen tokens, computing the output head only there; `Scorer` does micro-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainspan_schemas.config.settings import TrainSettings
from trainspan_training.data.layout import TokenBudget
from trainspan_training.data.micro_batches import MicroBatch
from trainspan_training.data.token_limits import TokenLimits
from trainspan_training.devices.team import Team
from trainspan_training.objective.attention import attention_of
from trainspan_training.objective.head import CHUNK, Traced, head_scores
from trainspan_training.objective.options import clip_range
from trainspan_training.objective.token_stats import TokenSums

__all__ = ["Probe", "Scorer", "Scores", "score"]


class Scores(NamedTuple):
    """Scores of N tokens."""

    logprobs: Tensor
    """(N,) natural logarithm of softmax(logits / temperature) over the allowed tokens."""
    entropies: Tensor
    """(N,) entropies of the same distributions, without gradient."""
    observed: Tensor | None = None
    """(M,) log-probabilities of the observation tokens, at temperature 1; None if they were not scored."""


class Probe(NamedTuple):
    """Receives what some of the N tokens teach."""

    tokens: Tensor
    """(n,) indices among the N."""
    receive: Callable[[Tensor, Tensor], None]
    """Called with their last hidden states (n, H) and the gradients (n, H) of their log-probabilities by them."""


def score(
    model: nn.Module,
    owner: Any,
    tokens: Tensor,
    predicting: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    attention: Mapping[str, Any] | None = None,
    *,
    limits: TokenLimits | None = None,
    chunk: int = CHUNK,
    probe: Probe | None = None,
) -> Scores:
    """Scores `targets` (N,) at `temperatures` (N,), predicted at flat positions `predicting` (N,) of `tokens` (B, T).

    `model` is called; `owner` is the language model that it may wrap. Without `attention`, rows are padded on the right
    and attention is causal, so that no token sees padding and no mask is needed. `limits` apply to the N targets. At
    most `chunk` logits exist at a time; scores have the dtype of `temperatures`.
    """
    with _chunked(owner, predicting, targets, temperatures, limits, chunk, probe):
        scores: Scores = model(input_ids=tokens, use_cache=False, **(attention or {}))
    return scores


@contextmanager
def _chunked(
    owner: Any,
    positions: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    limits: TokenLimits | None,
    chunk: int,
    probe: Probe | None,
) -> Iterator[None]:
    """Within the block the model returns scores instead of logits.

    The head's input is intercepted, and the head runs on zero positions; the actual work is done in chunks when the
    model returns, before its wrapper (FSDP) frees the head's weights.
    """
    head: nn.Module = owner.get_output_embeddings()
    inputs: list[Tensor] = []

    def intercept(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        inputs.append(hidden.flatten(0, 1).index_select(0, positions))
        return (hidden[:, :0], *rest)

    def trace(_: nn.Module, __: Any, logits: Tensor) -> Traced:
        return logits.as_subclass(Traced)

    def finish(_: nn.Module, __: Any, output: Any) -> Scores:
        for hook in hooks[:2]:
            hook.remove()
        after = output.logits
        assert isinstance(after, Traced), "the model's logits come from its head"
        rows = max(1, chunk // after.shape[-1])
        hidden = inputs.pop()
        if probe:
            chosen, some = probe.tokens, None if limits is None else limits.select(probe.tokens.cpu().numpy())
            with torch.enable_grad():
                states = hidden.detach()[chosen].requires_grad_()
                logprobs = head_scores(
                    head, after, states, targets[chosen], temperatures[chosen], rows, some, of_parameters=False
                )[0]
                (gradients,) = torch.autograd.grad(logprobs.sum(), [states])
            probe.receive(states.detach(), gradients)
        return Scores(*head_scores(head, after, hidden, targets, temperatures, rows, limits))

    hooks = [
        head.register_forward_pre_hook(intercept),
        head.register_forward_hook(trace),
        owner.register_forward_hook(finish, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Scorer:
    """Scores micro-batches as in training, under the live weights, which `policy` returns, or under another model."""

    def __init__(
        self,
        accelerator: Any,
        policy: Callable[[], Any],
        settings: TrainSettings,
        team: Team,
        *,
        dtype: torch.dtype,
        budget: TokenBudget | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._policy = policy
        self._team = team
        self._dtype = dtype
        self._by_call = settings.ratio == "call"
        self._clip_range = clip_range(settings)
        self.chunk = budget.logits if budget else CHUNK
        """Greatest number of logits at a time."""
        self.kept = budget.kept if budget else 0
        """Greatest micro-batch, in tokens, whose activations are kept, if checkpointing is enabled."""

    @torch.no_grad()
    def measure(self, *batches: MicroBatch) -> TokenSums:
        """The sums of micro-batches (as many of each process) under the current weights, without training on them."""
        policy = self._policy().eval()
        return self.over_team([self.sums(batch, self.score(policy, batch)) for batch in batches])

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, model: nn.Module | None = None) -> NDArray[np.float64]:
        """Log-probabilities (N,) of a micro-batch under the current weights, or under another model."""
        chosen: nn.Module = self._policy() if model is None else model
        chosen.eval()
        scores: NDArray[np.float64] = self.score(chosen, batch).logprobs.double().cpu().numpy()
        return scores

    def score(
        self, model: nn.Module, batch: MicroBatch, probe: Probe | None = None, *, observing: bool = False
    ) -> Scores:
        """The scores of the trained tokens and, if `observing`, of the observation tokens, in one forward pass."""
        owner: Any = self._accelerator.unwrap_model(model)
        for module in owner.modules():
            if hasattr(module, "_gradient_checkpointing_func"):  # once checkpointing is enabled
                module.gradient_checkpointing = batch.tokens.size > self.kept
        implementation = str(owner.config.get_text_config()._attn_implementation)
        count, seen = len(batch.targets), batch.observations if observing else None
        parts, limits = [(batch.predicting, batch.targets, batch.temperatures)], batch.limits
        if seen:
            parts.append((seen.predicting, seen.targets, np.ones_like(seen.weights)))
            limits = TokenLimits.joined([(limits, count), (None, len(seen.targets))])
        predicting, targets, temperatures = (np.concatenate(column) for column in zip(*parts, strict=True))
        with self._accelerator.autocast():
            scores = score(
                model,
                owner,
                self.tensor(batch.tokens),
                self.tensor(predicting),
                self.tensor(targets),
                self.tensor(temperatures, self._dtype),
                attention_of(batch.branches, implementation, self._accelerator.device),
                limits=limits,
                chunk=self.chunk,
                probe=probe,
            )
        return scores._replace(
            logprobs=scores.logprobs[:count],
            entropies=scores.entropies[:count],
            observed=scores.logprobs[count:] if seen else None,
        )

    def sums(self, batch: MicroBatch, scores: Scores) -> Tensor:
        """`TokenSums.measure` of the scores of a micro-batch."""
        seen, observed = batch.observations, scores.observed
        return TokenSums.measure(
            scores.logprobs,
            scores.entropies,
            observed=None if seen is None or observed is None else (observed, self.tensor(seen.counts)),
            sampled=self.tensor(batch.sampled),
            old=self.tensor(batch.old),
            reference=None if batch.reference is None else self.tensor(batch.reference),
            advantages=self.tensor(batch.advantages),
            calls=self.tensor(batch.calls) if self._by_call else None,
            forced=None if batch.limits is None else self.tensor(batch.limits.forced()),
            clip=self._clip_range,
        )

    def over_team(self, measured: Sequence[Tensor]) -> TokenSums:
        """The sums of several micro-batches, over all processes."""
        return sum(self._team.gather(TokenSums.collect(measured)), TokenSums())

    def tensor(self, values: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(values).to(self._accelerator.device, dtype)

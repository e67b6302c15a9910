"""The output head in chunks of positions: logits exist for one chunk at a time, recomputed in the backward pass.

Memory does not depend on the number of trained tokens: a chunk has at most `CHUNK` logits, each of which takes at most
`BYTES` while the chunk is processed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainspan_training.data.token_limits import TokenLimits

__all__ = ["BYTES", "CHUNK", "Traced", "head_scores"]

CHUNK = 2**26
"""Greatest number of logits (positions times vocabulary) at a time: 256 MiB in float32. A position is never split."""
BYTES = 12
"""Greatest number of bytes per logit, in float32 or bfloat16, forward or backward (measured)."""


class Traced(Tensor):
    """Empty logits that record what a model does to logits after its head (a scale, a soft cap)."""

    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(made, cls):
            source = next(value for value in args if isinstance(value, cls))
            made.steps = (*source.steps, (func, args, kwargs or {}))
        return made

    def replay(self, logits: Tensor) -> Tensor:
        """Applies the recorded steps to other logits."""
        for func, args, kwargs in self.steps:
            logits = func(*(logits if isinstance(value, Traced) else value for value in args), **kwargs)
        return logits


def head_scores(
    head: nn.Module,
    after: Traced,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    chunk: int,
    limits: TokenLimits | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) of `targets` (N,) at `temperatures` (N,), from hidden states (N, H).

    `after` replays the steps after the head; `chunk` positions are processed at a time; tokens barred by `limits` have
    probability 0. Gradients flow to the hidden states and the head's parameters, from the log-probabilities only.
    """
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    found: tuple[Tensor, Tensor] = _Head.apply(  # type: ignore[no-untyped-call]
        head, after, limits, targets, temperatures, chunk, hidden, *parameters
    )
    return found


class _Head(torch.autograd.Function):
    """The backward pass computes the softmax's gradient in closed form, and the head's by autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        after: Traced,
        limits: TokenLimits | None,
        targets: Tensor,
        temperatures: Tensor,
        chunk: int,
        hidden: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, Tensor]:
        dtype = temperatures.dtype
        logprobs, entropies, logsumexps = (
            torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(3)
        )
        for part in _parts(len(targets), chunk):
            scaled = after.replay(_outputs(head, hidden[part])).to(dtype).div_(temperatures[part, None])
            if limits:
                limits.take(part).apply(scaled, temperatures[part])
            logsumexps[part] = scaled.logsumexp(dim=1)
            logprobs[part] = scaled.gather(1, targets[part, None])[:, 0] - logsumexps[part]
            shares = scaled.sub_(logsumexps[part, None]).exp_()
            entropies[part] = torch.special.entr(shares, out=shares).sum(dim=1)
            del scaled, shares
        ctx.head, ctx.after, ctx.limits, ctx.chunk = head, after, limits, chunk
        kind = hidden.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(targets, temperatures, hidden, logsumexps)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, _ = gradients
        targets, temperatures, hidden, logsumexps = ctx.saved_tensors
        limits: TokenLimits | None = ctx.limits
        if limits:  # exactly 0 even if recomputed logits differ in rounding
            forced = torch.from_numpy(limits.forced()).to(gradient.device)
            gradient = gradient.masked_fill(forced, 0.0)
        parameters = [parameter for parameter in ctx.head.parameters() if parameter.requires_grad]
        of_hidden = torch.zeros_like(hidden)
        sums: list[Tensor | None] = [None] * len(parameters)
        kind, low, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(kind, low, enabled):
            for part in _parts(len(targets), ctx.chunk):
                states = hidden[part].detach().requires_grad_()
                logits = ctx.after.replay(_outputs(ctx.head, states))
                with torch.no_grad():
                    scaled = logits.to(temperatures.dtype) / temperatures[part, None]
                    if limits:
                        limits.take(part).apply(scaled, temperatures[part])
                    scale = gradient[part] / temperatures[part]
                    of_logits = _of_logits(scaled, targets[part], scale, logsumexps[part]).to(logits.dtype)
                    del scaled
                of_states, *of_parameters = torch.autograd.grad(logits, [states, *parameters], of_logits)
                del logits, of_logits
                of_hidden[part] = of_states
                for place, value in enumerate(of_parameters):
                    sums[place] = _added(sums[place], value)
                del of_parameters
        of_head = (
            torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, parameters, strict=True)
        )
        return None, None, None, None, None, None, of_hidden, *of_head


def _outputs(head: nn.Module, hidden: Tensor) -> Any:
    """Skips the head's hooks: FSDP counts them, and processes with different numbers of chunks would deadlock."""
    return head.forward(hidden)


def _parts(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _added(total: Tensor | None, value: Tensor) -> Tensor:
    """Accumulates over chunks, in float32 even if the head is in bfloat16."""
    if total is None:
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return total.add_(value)


def _of_logits(scaled: Tensor, targets: Tensor, scale: Tensor, logsumexps: Tensor) -> Tensor:
    """Gradient of the log-probabilities by the logits: (onehot − softmax) times `scale` (N,); overwrites `scaled`."""
    shares = scaled.sub_(logsumexps.unsqueeze(1)).exp_().mul_(-scale.unsqueeze(1))
    return shares.scatter_add_(1, targets.unsqueeze(1), scale.unsqueeze(1))

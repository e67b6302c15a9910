"""The output head in chunks of positions: logits exist for one chunk at a time, recomputed in the backward pass.

Memory does not depend on the number of trained tokens: a chunk has at most a given number of logits, which are stored
once, in the dtype of the matrix product; their gradient takes their place. On a GPU compiled code reads and writes them
once; elsewhere they pass through the processor's cache in blocks.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainspan_training.data.token_limits import TokenLimits

__all__ = ["CHUNK", "Traced", "block_bytes", "head_scores"]

CHUNK = 2**26
"""Number of logits (positions times vocabulary) at a time on a CPU: 256 MiB in float32. A position is never split."""
_BLOCK = 2**18
"""Number of logits at a time, for each thread, for which eager code has temporary copies: as many as its cache holds."""


class Traced(Tensor):
    """Empty logits that record what a model does to logits after its head (a scale, a soft cap)."""

    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(result, cls):
            source = next(value for value in args if isinstance(value, cls))
            result.steps = (*source.steps, (func, args, kwargs or {}))
        return result

    def without_last_conversions(self) -> "Traced":
        """Without conversions to float32 after all other steps: scores are computed in float32 anyway.

        Accelerate converts the outputs of a model under autocast; a chunk would exist in both dtypes, and twice in float32.
        """
        trimmed = self.as_subclass(Traced)
        trimmed.steps = self.steps
        while trimmed.steps and trimmed.steps[-1][0] is Tensor.float:
            trimmed.steps = trimmed.steps[:-1]
        return trimmed

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
    *,
    of_parameters: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) of `targets` (N,) at `temperatures` (N,), from hidden states (N, H).

    `after` replays the steps after the head; `chunk` positions are processed at a time; tokens barred by `limits` have
    probability 0. Gradients flow to the hidden states and (`of_parameters`) the head's parameters, from the log-probabilities only.
    """
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad and of_parameters]
    scores: tuple[Tensor, Tensor] = _Head.apply(  # type: ignore[no-untyped-call]
        head, after.without_last_conversions(), limits, targets, temperatures, chunk, hidden, *parameters
    )
    return scores


class _Head(torch.autograd.Function):
    """The backward pass computes the softmax's gradient in closed form, and the head's by autograd.

    The weight (V, H) of a linear head is an exception: each chunk's matrix product itself adds to the sum over chunks.
    """

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
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, logsumexps = (torch.empty_like(temperatures) for _ in range(3))
        for part in _parts(len(targets), chunk):
            logits = after.replay(_outputs(head, hidden[part]))
            for block, piece in _blocks(logits, part, limits, temperatures.dtype):
                logprobs[block], entropies[block], logsumexps[block] = _compiled(_statistics, logits.device.type)(
                    piece, targets[block], temperatures[block]
                )
            del logits, piece  # pyright: ignore[reportPossiblyUnboundVariable]
        ctx.head, ctx.after, ctx.limits, ctx.chunk, ctx.parameters = head, after, limits, chunk, parameters
        kind = hidden.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(targets, temperatures, hidden, logprobs, logsumexps)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        targets, temperatures, hidden, logprobs, logsumexps = ctx.saved_tensors
        scales = gradients[0] / temperatures
        if ctx.limits:  # exactly 0 even if recomputed logits differ in rounding
            scales = scales.masked_fill(torch.from_numpy(ctx.limits.forced()).to(scales.device), 0.0)
        parameters = ctx.parameters
        is_linear = type(ctx.head) is nn.Linear
        weight = next((each for each in parameters if is_linear and each is ctx.head.weight), None)
        others = [parameter for parameter in parameters if parameter is not weight]
        sums = {id(parameter): _zeros(parameter) for parameter in parameters}
        of_hidden = torch.zeros_like(hidden)
        all_states = hidden.detach().requires_grad_()
        kind, low, enabled = ctx.autocast
        with torch.autocast(kind, low, enabled):
            for part in _parts(len(targets), ctx.chunk):
                with torch.enable_grad():
                    states = all_states[part]  # a view: autocast would keep what it made of a leaf
                    outputs = _outputs(ctx.head, states)
                    logits = ctx.after.replay(outputs)
                slopes = logits.detach().clone() if ctx.after.steps else logits.detach()
                for block, piece in _blocks(slopes, part, ctx.limits, temperatures.dtype):
                    _compiled(_make_slopes, kind)(piece, temperatures[block], scales[block], logsumexps[block])
                    if ctx.limits:
                        slopes[block.start - part.start : block.stop - part.start] = piece
                at_targets = -torch.expm1(logprobs[part]) * scales[part]
                slopes.scatter_(1, targets[part, None], at_targets[:, None].to(slopes.dtype))
                of_outputs, of_states, *of_others = torch.autograd.grad(logits, [outputs, states, *others], slopes)
                of_hidden[part] = of_states
                for parameter, value in zip(others, of_others, strict=True):
                    sums[id(parameter)].add_(value)
                if weight is not None:
                    _add_product(sums[id(weight)], of_outputs, states.detach())
                del outputs, logits, slopes, piece, of_outputs  # pyright: ignore[reportPossiblyUnboundVariable]
        of_head = (sums[id(parameter)].to(parameter.dtype) for parameter in parameters)
        return None, None, None, None, None, None, of_hidden, *of_head


def _outputs(head: nn.Module, hidden: Tensor) -> Any:
    """Skips the head's hooks: FSDP counts them, and processes with different numbers of chunks would deadlock."""
    return head.forward(hidden)


def _parts(size: int, step: int, start: int = 0) -> list[slice]:
    return [slice(first, min(first + step, size)) for first in range(start, size, step)]


def _blocks(
    logits: Tensor, part: slice, limits: TokenLimits | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Positions and logits of the blocks of a chunk, which is at `part`; if there are limits, a copy under them."""
    rows = len(logits) if logits.is_cuda and not limits else _BLOCK * torch.get_num_threads() // logits.shape[1]
    for block in _parts(part.stop, max(1, rows), part.start):
        piece = logits[block.start - part.start : block.stop - part.start]
        if limits:
            piece = piece.to(dtype, copy=True)
            limits.select(block).apply(piece)
        yield block, piece


def _zeros(parameter: Tensor) -> Tensor:
    """For a sum over chunks: in float32 even if the head is in bfloat16."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _add_product(total: Tensor, slopes: Tensor, states: Tensor) -> None:
    """Adds the product of `slopes` (n, V), transposed, and `states` (n, H) to `total` (V, H), in the dtype of the total.

    The factors are rounded to the dtype of the slopes, as in the forward pass.
    """
    states = states.to(slopes.dtype)
    if total.is_cuda and total.dtype != slopes.dtype:
        torch.addmm(total, slopes.T, states, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(slopes.T.to(total.dtype), states.to(total.dtype))


def _statistics(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, entropies and logarithms of the normalizers (n,), of logits (n, V).

    Two passes when compiled; may overwrite the logits. With x = logit − greatest and Z = Σ eˣ, the entropy is
    log Z − Σ x eˣ / Z, in which both terms are at least 0.
    """
    scaled = logits.to(temperatures.dtype).div_(temperatures[:, None])
    greatest = scaled.amax(dim=1)
    shifted = scaled.sub_(greatest[:, None])
    of_targets = shifted.gather(1, targets[:, None])[:, 0]
    shares = shifted.exp()
    totals = shares.sum(dim=1)
    entropies = totals.log() - shares.mul_(shifted).sum(dim=1) / totals
    return of_targets - totals.log(), entropies, greatest + totals.log()


def _make_slopes(logits: Tensor, temperatures: Tensor, scales: Tensor, logsumexps: Tensor) -> None:
    """Replaces logits (n, V) by −softmax times `scales` (n,): the log-probabilities' gradient, but for the targets."""
    scaled = logits.to(temperatures.dtype).div_(temperatures[:, None])
    scaled.sub_(logsumexps[:, None]).exp_().mul_(-scales[:, None])
    if logits.dtype != temperatures.dtype:
        logits.copy_(scaled)


def block_bytes(vocabulary: int) -> int:
    """Greatest size of temporary copies and of expanded masks: 32 bytes for each logit of a block."""
    return 32 * vocabulary * max(1, _BLOCK * torch.get_num_threads() // vocabulary)


@functools.cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compiled for a GPU: one kernel without copies of the logits, for any number of positions."""
    return torch.compile(function, dynamic=True, fullgraph=True) if device == "cuda" else function

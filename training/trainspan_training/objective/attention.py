"""Attention for trees and rows packed into one sequence: which tokens see which.

One attention function serves all layouts and dispatches on what it gets in place of the mask, so that activations
recomputed in the backward pass take the same path as in the forward pass:

- nothing: rows padded on the right, plain causal attention;
- a block mask: compiled flex attention, on a GPU;
- ends of subtrees (int64): on a CPU, run by run without a mask (`_Branched`).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainspan_schemas.errors import ConfigError
from trainspan_training.data.cuts import BLOCK
from trainspan_training.data.layout import refusal
from trainspan_training.data.micro_batches import Branches

__all__ = ["NAME", "attend", "attention_of", "block_mask", "dense_mask", "prepare"]

NAME = "trainspan"
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
_HAS_KERNEL = all(hasattr(torch.ops.aten, name) for name in (_KERNEL, f"{_KERNEL}_backward"))
"""It is private: a later PyTorch may not have it."""


def prepare(model: Any, mode: str) -> bool:
    """Sets the model's attention function; returns False if it does not accept one, so that rows can only be padded.

    A model with layers that would not use our mask keeps its own function: ours would ignore a sliding window.
    """
    if mode == "padded":
        return True
    if model.config._attn_implementation != "sdpa" or refusal(model.config.get_text_config()):
        return False
    if not (_HAS_KERNEL or torch.cuda.is_available()):
        return False
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def attention_of(branches: Branches | None, implementation: str, device: torch.device) -> dict[str, Any]:
    """Arguments for the model's forward pass; empty for rows padded on the right.

    `implementation` is the model's attention; any other than ours gets a dense mask.
    """
    if branches is None:
        return {}
    ends = torch.from_numpy(branches.ends).to(device)
    positions = torch.from_numpy(branches.depths).to(device).unsqueeze(0)
    mask: Any
    if implementation != NAME:
        mask = dense_mask(ends)
    elif device.type != "cuda":
        mask = ends.view(1, 1, 1, -1)
    else:
        mask = block_mask(ends)
    return {"attention_mask": mask, "position_ids": positions}


def dense_mask(ends: Tensor) -> Tensor:
    """(1, 1, T, T) whether a token sees another, from the ends (T,) of subtrees."""
    places = torch.arange(len(ends), device=ends.device)
    seen = (places.unsqueeze(0) <= places.unsqueeze(1)) & (places.unsqueeze(1) < ends.unsqueeze(0))
    return seen[None, None]


def block_mask(ends: Tensor) -> BlockMask:
    """The mask for flex attention, from the ends (T,) of subtrees, T in whole blocks: it computes only blocks with a visible pair.

    A block of keys is visible to a later block of queries if a subtree ends after the first query, and visible as a whole
    if all end after the last. So pairs of tokens are never in memory, and nothing is compiled for a number of tokens.
    """

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    first, last = ends.view(-1, BLOCK).aminmax(dim=1)
    starts = torch.arange(0, len(ends), BLOCK, device=ends.device)
    later = starts[:, None] > starts
    whole = later & (first >= starts[:, None] + BLOCK)
    diagonal = (ends > torch.arange(len(ends), device=ends.device)).view(-1, BLOCK).any(dim=1)
    partly = (later & (last > starts[:, None]) & ~whole) | diagonal.diag()
    return BlockMask.from_kv_blocks(
        *_listed(partly), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(len(ends), len(ends))
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the blocks of queries (Q, K): the number (1, 1, Q) of their blocks of keys, and those first (1, 1, Q, K)."""
    numbers = blocks.sum(dim=1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return numbers[None, None], indices[None, None].contiguous()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` (1, heads, T, D), with transformers' signature; returns (1, T, heads, D).

    Raises ConfigError if the model has a bias for pairs of tokens, whose positions packed rows do not have, or a mask of its own.
    """
    if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if options.get("position_bias") is not None:
        raise ConfigError('the model\'s attention has a position bias: set model.forward = "padded"')
    if not isinstance(attention_mask, Tensor):
        return _by_flex(query, key, value, attention_mask, options), None
    if attention_mask.dtype != torch.int64:
        raise ConfigError('the model computes a mask of its own for its attention: set model.forward = "padded"')
    return _by_runs(query, key, value, attention_mask, options.get("scaling")), None


def _by_flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
    """Query heads share keys and values in the kernel. Under autocast rotated queries and keys are float32."""
    inline = not query.is_cuda or torch.compiler.is_compiling()
    attention = flex_attention if inline else _compiled(flex_attention)
    query, key = query.to(value.dtype), key.to(value.dtype)
    seen: Tensor = attention(query, key, value, block_mask=mask, scale=options.get("scaling"), enable_gqa=True)
    return seen.transpose(1, 2).contiguous()


@functools.cache
def _compiled(function: Any) -> Any:
    """Compiled as a whole: PyTorch then refuses what it would otherwise run with all pairs in memory.

    Beyond its limit of variants (8) it would end the round: dtypes, gradients and trained matrices are variants.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, fullgraph=True)


class _Run(NamedTuple):
    """Adjacent tokens of a sequence with the same subtree: each sees those before it, and the rest of the subtree sees all."""

    start: int
    stop: int
    end: int
    """End of the subtree; `stop` if the run is a leaf."""


_known: Any = WeakTensorKeyDictionary()
"""Runs by the tensor of ends: all layers share one, kept for their backward pass."""


def _by_runs(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None) -> Tensor:
    if ends not in _known:
        _known[ends] = _runs(ends.flatten())
    query, key = query.to(value.dtype), key.to(value.dtype)  # as autocast does for SDPA
    width, out_width = query.shape[-1], value.shape[-1]
    if width != out_width:  # the kernel has one width; further zeros change no score
        query, key, value = (
            nn.functional.pad(each, (0, max(width, out_width) - each.shape[-1])) for each in (query, key, value)
        )
    # The kernel reads the last dimension as if its stride were 1.
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    seen: Tensor = _Branched.apply(query, key, value, _known[ends], width**-0.5 if scale is None else scale)  # type: ignore[no-untyped-call]
    return seen[..., :out_width].transpose(1, 2).contiguous()


def _runs(ends: Tensor) -> list[_Run]:
    """The runs of a sequence, from the ends (T,) of subtrees."""
    values, counts = torch.unique_consecutive(ends, return_counts=True)
    stops = counts.cumsum(0)
    return [_Run(*run) for run in zip((stops - counts).tolist(), stops.tolist(), values.tolist(), strict=True)]


class _Branched(torch.autograd.Function):
    """Attention in prefix trees, without masks or copies of shared keys: the work is that of visible pairs.

    Each run of tokens attends to itself, and the rest of its subtree to the run. These partial softmaxes are merged by
    their normalizers, and each gives its exact part of the gradient from the merged ones, as in ring attention
    (arXiv 2310.01889). The kernel is that of SDPA; sums over parts are in float32 at least.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[_Run], scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.empty(query.shape, dtype=wide)
        normalizers = torch.empty(query.shape[:3], dtype=wide)
        for keys, queries in _parts(runs):
            part, part_normalizers = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], is_causal=keys == queries, scale=scale
            )
            if keys == queries:
                output[:, :, queries], normalizers[:, :, queries] = part, part_normalizers
                continue
            before = normalizers[:, :, queries]
            share = torch.sigmoid(part_normalizers - before)
            output[:, :, queries].lerp_(part.to(wide), share[..., None])
            normalizers[:, :, queries] = torch.logaddexp(before, part_normalizers)
        merged = output.to(query.dtype)
        ctx.runs, ctx.scale = runs, scale
        ctx.save_for_backward(query, key, value, merged, normalizers)
        return merged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, merged, normalizers = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        totals = [torch.zeros(each.shape, dtype=normalizers.dtype) for each in (query, key, value)]
        for keys, queries in _parts(ctx.runs):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                merged[:, :, queries],
                normalizers[:, :, queries],
                0.0,
                keys == queries,
                scale=ctx.scale,
            )
            for total, places, part in zip(totals, (queries, keys, keys), parts, strict=True):
                total[:, :, places] += part
        return *(total.to(query.dtype) for total in totals), None, None


def _parts(runs: Sequence[_Run]) -> Iterator[tuple[slice, slice]]:
    """Keys and the queries that see them: all if they differ, causally if they are the same. Each query sees itself first."""
    for start, stop, _ in runs:
        yield slice(start, stop), slice(start, stop)
    for start, stop, end in runs:
        if end > stop:
            yield slice(start, stop), slice(stop, end)


AttentionInterface.register(NAME, attend)

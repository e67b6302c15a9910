"""Attention for trees and rows packed into one sequence: which tokens see which.

One attention function serves all layouts and dispatches on what it gets in place of the mask, so that activations
recomputed in the backward pass take the same path as in the forward pass:

- nothing: rows padded on the right, plain causal attention;
- a block mask: compiled flex attention, on a GPU;
- ends of subtrees (int64): on a CPU, one tree at a time, a single row without a mask. No mask is larger than a tree.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainspan_training.data.cuts import BLOCK
from trainspan_training.data.layout import refusal
from trainspan_training.data.micro_batches import Branches

__all__ = ["NAME", "attend", "attention_of", "block_mask", "dense_mask", "prepare"]

NAME = "trainspan"


def prepare(model: Any, mode: str) -> bool:
    """Sets the model's attention function; returns False if it does not accept one, so that rows can only be padded.

    A model with layers that would not use our mask keeps its own function: ours would ignore a sliding window.
    """
    if mode == "padded":
        return True
    if model.config._attn_implementation != "sdpa" or refusal(model.config.get_text_config()):
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
    """Attention of `query` (1, heads, T, D), with transformers' signature; returns (1, T, heads, D)."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        return _by_flex(query, key, value, attention_mask, options), None
    if attention_mask is None or attention_mask.dtype == torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return _by_pieces(module, query, key, value, attention_mask, options), None


def _by_flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
    """Query heads share keys and values in the kernel. Under autocast rotated queries and keys are float32: see `_by_flash`."""
    inline = not query.is_cuda or torch.compiler.is_compiling()
    attention = flex_attention if inline else _compiled(flex_attention)
    query, key = query.to(value.dtype), key.to(value.dtype)
    seen: Tensor = attention(query, key, value, block_mask=mask, scale=options.get("scaling"), enable_gqa=True)
    return seen.transpose(1, 2)


@functools.cache
def _compiled(function: Any) -> Any:
    """Compiled as a whole: PyTorch then refuses what it would otherwise run with all pairs in memory.

    Beyond its limit of variants (8) it would end the round: dtypes, gradients and trained matrices are variants.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, fullgraph=True)


def _by_pieces(module: Any, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, options: dict[str, Any]) -> Tensor:
    outputs = []
    for start, stop, mask in _pieces(ends, query.dtype):
        part = (slice(None), slice(None), slice(start, stop))
        outputs.append(sdpa_attention_forward(module, query[part], key[part], value[part], mask, **options)[0])
    return torch.cat(outputs, dim=1)


_known: Any = WeakTensorKeyDictionary()
"""Pieces by the tensor of ends and the dtype of queries: all layers share one mask, kept for their backward pass."""


def _pieces(ends: Tensor, dtype: torch.dtype) -> list[tuple[int, int, Tensor | None]]:
    """Start and end of each tree, and its additive mask; None for a single row."""
    known = _known.setdefault(ends, {})
    if dtype not in known:
        flat = ends.flatten()
        pieces = Branches.split(flat.cpu().numpy())
        known[dtype] = [
            (start, stop, None if chain else _additive(dense_mask(flat[start:stop] - start), dtype))
            for start, stop, chain in pieces
        ]
    masked: list[tuple[int, int, Tensor | None]] = known[dtype]
    return masked


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


AttentionInterface.register(NAME, attend)

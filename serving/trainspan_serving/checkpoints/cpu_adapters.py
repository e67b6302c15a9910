"""Several adapters in one batch on a CPU: each is applied to its own tokens, and none to tokens of the base model.

vLLM 0.32 gathers a copy of an adapter's matrix for each token, which takes most of a batch's time. It also applies the adapter
in the last slot to tokens without one, whose index is -1.
"""

from typing import Any

import torch
import wrapt

__all__ = ["apply_adapters_by_slot"]


def apply_adapters_by_slot() -> None:
    """Replaces vLLM's CPU operations for adapters of linear layers, once their module is imported in this process."""
    wrapt.register_post_import_hook(_replace, "vllm.lora.punica_wrapper.punica_cpu")


def _replace(module: Any) -> None:
    module.PunicaWrapperCPU._apply_shrink = _apply_shrink
    module.PunicaWrapperCPU._apply_expand = _apply_expand


def _apply_shrink(self: Any, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
    """y[token] = scale · A x[token]; `w_t_all` has A of each slot: (slots, 1, rank, inputs)."""
    y = y.view(-1, y.shape[-1])
    for slot, rows in _rows_by_slot(self):
        matrix = w_t_all[slot, 0].to(y.dtype)
        product = scale * (_selected(x, rows).to(y.dtype) @ matrix.t())
        target = y[:, : product.shape[1]]
        if rows is None:
            target.copy_(product)
        else:
            target.index_copy_(0, rows, product)


def _apply_expand(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    w_t_all: torch.Tensor,
    y_offset: int,
    y_slice_size: int,
    add_inputs: bool = True,
) -> None:
    """y[token, slice] += B x[token]; `w_t_all` has B of each slot: (slots, 1, outputs of the slice, rank)."""
    target = y.view(-1, y.shape[-1])[:, y_offset : y_offset + y_slice_size]
    for slot, rows in _rows_by_slot(self):
        product = _selected(x, rows).to(y.dtype) @ w_t_all[slot, 0].to(y.dtype).t()
        if rows is None:
            target.copy_(target + product if add_inputs else product)
        elif add_inputs:
            target.index_add_(0, rows, product)
        else:
            target.index_copy_(0, rows, product)


def _selected(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)


def _rows_by_slot(wrapper: Any) -> list[tuple[int, torch.Tensor | None]]:
    """Each slot in use with the rows of its tokens (None: all); the same for all layers of a batch."""
    indices = wrapper.token_lora_indices
    batch = (indices._version, len(indices))
    if getattr(wrapper, "rows_of_batch", None) != batch:
        slots = [int(slot) for slot in indices.unique().tolist()]
        is_only = len(slots) == 1
        wrapper.rows_by_slot = [
            (slot, None if is_only else (indices == slot).nonzero().squeeze(1)) for slot in slots if slot >= 0
        ]
        wrapper.rows_of_batch = batch
    rows_by_slot: list[tuple[int, torch.Tensor | None]] = wrapper.rows_by_slot
    return rows_by_slot

"""What a model's attention is told of a prefix tree: positions, and who sees whom."""

from typing import Any

import torch
from torch import Tensor

from .batches import Branches

__all__ = ["FLEX", "attention_of", "block_mask", "dense_mask", "prepare"]

FLEX = "flex_attention"


def prepare(model: Any, mode: str, *, dense: bool) -> None:
    """Switches the model to flex attention where prefix trees may come and compiled attention is to compute them.

    For good: activations that are computed again in the backward pass must find what the forward pass found.
    """
    if mode != "padded" and not dense:
        model.set_attn_implementation(FLEX)


def attention_of(branches: Branches | None, implementation: str, device: torch.device) -> dict[str, Any]:
    """Arguments of the model's forward pass; none for rows that are padded on the right, which plain causal attention fits.

    `implementation` is the model's attention: flex attention gets a block mask, any other one a dense mask.
    """
    if branches is None:
        return {}
    depths, ends = torch.from_numpy(branches.depths).to(device), torch.from_numpy(branches.ends).to(device)
    mask = block_mask(ends) if implementation == FLEX else dense_mask(ends)
    return {"attention_mask": mask, "position_ids": depths.unsqueeze(0)}


def dense_mask(ends: Tensor) -> Tensor:
    """(1, 1, T, T) true where a token sees another, from the ends (T,) of subtrees."""
    places = torch.arange(len(ends), device=ends.device)
    seen = (places.unsqueeze(0) <= places.unsqueeze(1)) & (places.unsqueeze(1) < ends.unsqueeze(0))
    return seen[None, None]


def block_mask(ends: Tensor) -> Any:
    """The same for flex attention, which computes only the blocks in which something is seen."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return create_block_mask(sees, None, None, len(ends), len(ends), device=str(ends.device))

"""Tensors that are split over the processes of a team (FSDP2, PyTorch's `fully_shard`), made whole and put back.

Gathering is done by all processes together, tensor by tensor, in the same order.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["admit_cpu", "gathered", "like", "settled", "whole"]


def settled(model: Any) -> Any:
    """The model, after it let go of the whole parameters that a forward pass leaves in the place of their parts."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of its parts together; every process takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(named: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The tensors whole, in the memory of the CPU; nothing where they are not to be kept. One under two names stays one."""
    kept: dict[int, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in kept:
            complete = whole(tensor.detach())
            kept[id(tensor)] = complete.cpu().contiguous() if keep else torch.empty(0)
    return {name: kept[id(tensor)] for name, tensor in named.items()} if keep else {}


def like(tensor: Tensor, live: Tensor) -> Tensor:
    """A whole tensor on the device of `live`, and split as that one is."""
    moved = tensor.to(live.device, live.dtype)
    if not isinstance(live, DTensor):
        return moved
    return distribute_tensor(moved, live.device_mesh, live.placements, src_data_rank=None)


def admit_cpu() -> None:
    """Lets accelerate split weights over processes that have no GPU: by itself it would take no notice of the setting."""
    state = PartialState()
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU

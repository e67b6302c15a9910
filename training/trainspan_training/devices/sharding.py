"""Tensors split by rows over the processes of a team (FSDP2, PyTorch's `fully_shard`): gathered, or handled in parts.

All processes gather together, tensor by tensor, in the same order.
"""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from trainspan_schemas.errors import CheckpointError
from trainspan_training.checkpoints.tensor_files import TensorParts

__all__ = ["admit_cpu", "compute_in_bf16", "local", "part_of", "resharded", "rows_of", "stored", "whole"]


def resharded(model: Any) -> Any:
    """The model, after freeing the whole parameters that a forward pass leaves in place of their parts."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or gathered from its parts; every process takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The tensor itself, or the part of it that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(tensor: Tensor) -> tuple[int, int] | None:
    """The rows of a split tensor that this process holds, as (first, last + 1); None if it holds all."""
    if not isinstance(tensor, DTensor):
        return None
    (placement,), mesh = tensor.placements, tensor.device_mesh
    assert placement == Shard(0), f"split by {placement}, not by rows"
    each = -(-tensor.shape[0] // mesh.size())  # as torch.chunk splits
    first = min(mesh.get_local_rank() * each, tensor.shape[0])
    return first, first + tensor.to_local().shape[0]


def stored(live: Tensor, parts: TensorParts, name: str) -> Tensor:
    """Reads a live tensor, or this process's part of it, from files, to its device and in its type.

    Raises CheckpointError if the shapes differ.
    """
    bounds, target = rows_of(live), local(live)
    saved = parts.whole(name) if bounds is None else parts.rows(name, *bounds)
    if saved.shape != target.shape:
        raise CheckpointError(f"{name!r} has shape {list(saved.shape)} on disk, {list(target.shape)} in the model")
    return saved.to(target.device, target.dtype)


def part_of(complete: Tensor, live: Tensor) -> Tensor:
    """The part of a whole tensor that this process holds in the live one, on its device and in its type."""
    bounds, target = rows_of(live), local(live)
    return (complete if bounds is None else complete[bounds[0] : bounds[1]]).to(target.device, target.dtype)


def compute_in_bf16(accelerator: Any) -> None:
    """Gathers and computes layers in bfloat16; weights, gradients and their sums over processes stay float32."""
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )


def admit_cpu() -> None:
    """Lets accelerate split weights over processes without a GPU; it would otherwise ignore the setting."""
    state = PartialState()
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU

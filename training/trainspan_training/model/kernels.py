"""What makes the layers of a model fast on a GPU: Liger's kernels, and a residual stream in the dtype of the computation.

Norms and gates are then one pass over memory each and keep only their inputs for the backward pass. They round as the
model's own functions do, in float32 within a kernel.
"""

import importlib.util
import logging
import sys
from typing import Any

import torch
from torch import nn

__all__ = ["accelerate_layers", "fusible", "round_residual"]

log = logging.getLogger(__name__)

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose layers are two norms, attention and a gated product, as the memory estimate counts them."""
_GATES = ("silu", "swish")
"""Liger's product has this gate, whatever a configuration says."""


def fusible(config: Any) -> bool:
    """Whether layers of this configuration get Liger's kernels on a GPU: they compute the same, and are installed."""
    same = config.model_type in _KINDS and config.hidden_act in _GATES
    return same and all(importlib.util.find_spec(package) for package in ("liger_kernel", "triton"))


def accelerate_layers(model: Any, *, bf16: bool) -> Any:
    """Changes a model in place for a GPU, and returns it; `bf16`: it computes in bfloat16 from weights of any dtype."""
    if bf16:
        round_residual(model)
    if fusible(model.config):
        _fuse(model)
    else:
        log.info(
            "layers of %s run without Liger's kernels: it has none for them, or is not installed", type(model).__name__
        )
    return model


def round_residual(model: Any) -> None:
    """Makes the residual stream bfloat16, as in the policy server: under autocast, embeddings would make it float32."""

    def rounded(_module: nn.Module, _inputs: Any, states: torch.Tensor) -> torch.Tensor:
        return states.to(torch.bfloat16)

    model.get_input_embeddings().register_forward_hook(rounded)


def _fuse(model: Any) -> None:
    from transformers.integrations.liger import apply_liger_kernel

    # Liger replaces the functions of this model, and the classes of models that are made later: these it should not.
    module = vars(sys.modules[type(model).__module__])
    classes = dict(module)
    # Rotations are a small part, and one function for all models of a process.
    kernels = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    try:
        apply_liger_kernel(model, kernels)  # type: ignore[no-untyped-call]
    finally:
        module.update(classes)

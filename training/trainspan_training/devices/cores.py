"""Threads and allocator of the trainer's processes, which share the cores of a machine."""

import os

from trainspan_schemas.resources import available_cores

__all__ = ["prepare_process", "share_cores"]


def prepare_process() -> None:
    """Sets what PyTorch reads from the environment, unless it is set; only before PyTorch is imported.

    - Waiting threads sleep: one that spins takes the core that a preempted peer waits for (`python -m benchmarks threads`).
    - The GPU's allocator grows its segments: micro-batches of many sizes would otherwise leave unusable gaps between them.
      A policy server must not inherit this: vLLM's sleep mode does not work with such segments.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which PyTorch reads too
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def share_cores(processes: int) -> None:
    """Divides the cores among the processes, unless OMP_NUM_THREADS is set."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // processes))

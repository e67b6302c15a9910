"""Threads of the trainer: its processes share the cores of a machine."""

import os

from trainspan_schemas.resources import available_cores

__all__ = ["share_cores", "wait_passively"]


def wait_passively() -> None:
    """Lets waiting threads sleep, unless OMP_WAIT_POLICY is set; only before PyTorch is imported.

    A thread that spins takes the core that a preempted peer waits for. `python -m benchmarks threads` measures it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def share_cores(processes: int) -> None:
    """Divides the cores among the processes, unless OMP_NUM_THREADS is set."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // processes))

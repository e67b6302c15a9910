"""Threads of the trainer: its processes share the cores of a machine."""

import os

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
        torch.set_num_threads(max(1, _cores() // processes))


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

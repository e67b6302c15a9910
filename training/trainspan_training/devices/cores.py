"""Threads per process: the cores of a machine are shared by its processes."""

import os

__all__ = ["share_cores"]


def share_cores(processes: int) -> None:
    """Half of the cores among the processes, unless OMP_NUM_THREADS says otherwise.

    Threads that wait for one that another process displaced spin: on two busy cores two threads were six times slower than one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2 // processes))

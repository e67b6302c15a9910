"""Threads per process: divides the cores of a machine among its processes."""

import os

__all__ = ["share_cores"]


def share_cores(processes: int) -> None:
    """Divides half of the cores among the processes, unless OMP_NUM_THREADS is set.

    Worker threads spin while a preempted peer catches up: on two busy cores, two threads ran six times slower than one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2 // processes))

"""Threads and allocator of the trainer's processes."""

import os
import subprocess
import sys

import pytest

from trainspan_schemas.resources import available_cores

PROGRAM = """
import os
from trainspan_training.devices.cores import prepare_process, share_cores
prepare_process()
share_cores({processes})
import torch
print(torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"], os.environ.get("PYTORCH_ALLOC_CONF"))
"""
CORES = available_cores()


GROWING = "expandable_segments:True"
OTHERS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "ACTIVE", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("processes", "given", "expected"),
    [
        (1, {}, [CORES, "PASSIVE", GROWING]),
        (2, {}, [max(1, CORES // 2), "PASSIVE", GROWING]),
        (1, OTHERS, [1, "ACTIVE", None]),
    ],
)
def test_processes_share_the_cores_wait_without_spinning_and_grow_segments_unless_told_otherwise(
    processes: int, given: dict[str, str], expected: list[object]
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTORCH_"))} | given
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(processes=processes)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(value) for value in expected]

"""Threads of the trainer's processes."""

import os
import subprocess
import sys

import pytest

from trainspan_schemas.resources import available_cores

PROGRAM = """
import os
from trainspan_training.devices.cores import share_cores, wait_passively
wait_passively()
share_cores({processes})
import torch
print(torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"])
"""
CORES = available_cores()


@pytest.mark.parametrize(
    ("processes", "given", "threads"),
    [(1, {}, CORES), (2, {}, max(1, CORES // 2)), (1, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "ACTIVE"}, 1)],
)
def test_processes_share_the_cores_and_wait_without_spinning(
    processes: int, given: dict[str, str], threads: int
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")} | given
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(processes=processes)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(threads), given.get("OMP_WAIT_POLICY", "PASSIVE")]

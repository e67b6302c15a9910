"""What children of tests begin with: everything imported, one thread, nothing computed. Loaded by `forks`."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

from tests.training.support.processes.imports import import_once

import_once()

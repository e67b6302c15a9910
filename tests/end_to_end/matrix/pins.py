"""Writes the pins of the matrix: `python -m tests.end_to_end.matrix.pins [CASE …]`, for the newest releases of today.

Each Python case gets `constraints/matrix/NAME.txt`: its requirements and those of the base install, resolved together.
Node's packages are pinned by `npm install --package-lock-only` in `constraints/matrix`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.end_to_end.agents.test_releases import PYTHON
from tests.end_to_end.matrix.cases import CASES
from tests.end_to_end.matrix.environments import PINS, install_uv
from tests.support.places import ROOT

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        uv = install_uv(Path(place))
        for case in CASES:
            if not case.is_python or (sys.argv[1:] and case.name not in sys.argv[1:]):
                continue
            # As one requirement: with trainspan's own ones listed next to the framework's, the resolver picks old releases of frameworks.
            requirements = "\n".join([*case.requirements, f"trainspan @ file://{ROOT}"])
            command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", PYTHON, "-"]
            done = subprocess.run(command, input=requirements, capture_output=True, text=True, check=True, timeout=300)
            pins = [line for line in done.stdout.splitlines() if not line.startswith("trainspan")]
            (PINS / f"{case.name}.txt").write_text("\n".join(pins) + "\n")
            sys.stdout.write(f"{case.name}: {len(pins)} packages\n")

"""The lowest supported TRL, installed separately from the environment, passes the exactness tests."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.places import ROOT


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
def test_loss_and_gradient_are_exact_with_the_lowest_supported_trl(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = [text for text in project["optional-dependencies"]["training"] if text.startswith("trl")]
    lowest = bound.removeprefix("trl>=").split(",")[0]
    place = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(place),
        f"trl=={lowest}.0",
    ]
    subprocess.run(install, check=True, timeout=300)
    program = "import sys, trl, pytest; assert trl.__version__ == sys.argv[1], trl.__file__; sys.exit(pytest.main(sys.argv[2:]))"
    files = ["tests/training/objective/test_loss.py", "tests/training/sft/test_trainer.py"]
    tests = ["-q", "-p", "no:cacheprovider", *files, "-k", "not two_processes"]
    done = subprocess.run(
        [sys.executable, "-c", program, f"{lowest}.0", *tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

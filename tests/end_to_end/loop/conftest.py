"""One run of the demo on separate ports; the tests use its model."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT, DemoRun, make_place

SMALLER = {"TRAINSPAN_LOOP__TASKS_PER_ROUND": "16", "TRAINSPAN_LOOP__VAL_TASKS": "24"}
"""Half the tasks of a round, an eighth of those of a validation."""
MODEL = """
import sys
from pathlib import Path
import policy
policy.BATCH = 32
policy.make_policy(Path(sys.argv[1]))
"""
"""The demo's model, warmed up in half the time: it starts with the same success."""


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    place = make_place(tmp_path_factory.mktemp("demo") / "home")
    _make_model(place.home / "calculator" / "model")
    process = subprocess.Popen(
        ["make", "demo-tiny", "ROUNDS=2", "HELDOUT=100"],
        cwd=ROOT,
        env=place.environ | SMALLER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=840)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate()
        pytest.fail(f"make demo-tiny ROUNDS=2 took more than 840 s: {err[-2000:]}")
    return DemoRun(place, subprocess.CompletedProcess(process.args, process.returncode, out, err))


def _make_model(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", MODEL, str(folder)],
        cwd=ROOT / "examples" / "calculator",
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        check=True,
        capture_output=True,
    )


@pytest.fixture
def background() -> "Iterator[list[subprocess.Popen[str]]]":
    """Processes that are stopped after the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in reversed(processes):
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

"""The agents of a runner that is killed with SIGKILL end, with the processes that they have started."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rollouts.conftest import write_tasks
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.otlp.recorder import OtlpRecorder

SOURCE = """
import os, subprocess, sys, time

def solve(task):
    child = subprocess.Popen(["sleep", "300"])
    with open("pids", "w") as file:
        file.write(f"{os.getpid()} {child.pid}\\n")
    time.sleep(300)

if __name__ == "__main__":
    solve(None)
"""


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("target", [["agent.py:solve"], ["--", "python", "agent.py"]])
def test_agents_and_their_children_end_with_a_killed_runner(
    tmp_path: Path, recorder: OtlpRecorder, target: list[str]
) -> None:
    write(tmp_path, SOURCE)
    write_tasks(tmp_path, {"id": "1", "input": "x"})
    own = {"TRAINSPAN_COLLECTOR__ENDPOINTS": recorder.endpoint, "TRAINSPAN_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", "tasks.jsonl", "--n", "1", *target]
    with (tmp_path / "output").open("w") as output:
        runner = subprocess.Popen(
            command, cwd=tmp_path, env=environment({**WITHOUT_OPENAI, **own}), stdout=output, stderr=output
        )
    pids = tmp_path / "pids"
    assert wait_for(lambda: pids.exists() and pids.read_text().endswith("\n")), (tmp_path / "output").read_text()
    agent, child = pids.read_text().split()
    assert is_alive(agent)
    assert is_alive(child)
    runner.kill()
    runner.wait()
    assert wait_for(lambda: not is_alive(agent) and not is_alive(child))

"""The loop is killed in the middle of a run and restarted."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT, DemoRun, Place, make_place, write_loop_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def start(config: Path, place: Place) -> "subprocess.Popen[str]":
    command = ["trainspan", "loop", "--config", str(config), "--resume", "--format", "json"]
    return subprocess.Popen(
        command, cwd=ROOT, env=place.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rounds(place: Place) -> list[dict[str, Any]]:
    found = []
    for path in (place.home / "runs").glob("*/rounds.jsonl"):
        found += [record for record in map(json.loads, path.read_text().splitlines()) if record["kind"] == "round"]
    return found


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("seconds_after_the_first_round", [0.5, 3.0, 5.5])
def test_a_killed_loop_leaves_no_process_and_continues_where_it_was(
    demo: DemoRun, tmp_path: Path, seconds_after_the_first_round: float
) -> None:
    place = make_place(tmp_path / "home")
    calculator = demo.place.home / "calculator"
    config = tmp_path / "trainspan.toml"
    write_loop_config(
        config,
        calculator,
        train={"learning_rate": 1e-4},
        loop={"rounds": 4, "tasks_per_round": 16, "eval_tasks": 40, "eval_every": 0},
    )

    loop = start(config, place)
    deadline = time.monotonic() + 240
    while not rounds(place):
        assert loop.poll() is None, loop.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    collector = json.loads((place.home / "spans.duckdb.json").read_text())["pid"]
    time.sleep(seconds_after_the_first_round)
    loop.send_signal(signal.SIGKILL)
    loop.wait()
    deadline = time.monotonic() + 40
    while is_running(collector):
        assert time.monotonic() < deadline, "the collector outlived the loop"
        time.sleep(0.2)

    again = start(config, place)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err[-3000:]
    assert [record["round"] for record in rounds(place)] == [1, 2, 3, 4]
    (folder,) = (place.home / "runs").iterdir()
    ledger = map(json.loads, (folder / "checkpoints" / "ledger.jsonl").read_text().splitlines())
    trained = Counter(entry["dataset"] for entry in ledger if entry["event"] == "trained")
    assert len(trained) == 4
    assert set(trained.values()) == {1}

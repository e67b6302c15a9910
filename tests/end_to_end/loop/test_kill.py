"""The loop is killed in the middle of a run and restarted, and its policy server crashes."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
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


def configure(folder: Path, demo: DemoRun) -> Path:
    return write_loop_config(
        folder / "trainspan.toml",
        demo.place.home / "calculator",
        train={"learning_rate": 1e-4},
        loop={"rounds": 4, "tasks_per_round": 16, "eval_tasks": 40, "eval_every": 0},
    )


def wait_for_round(loop: "subprocess.Popen[str]", place: Place) -> None:
    deadline = time.monotonic() + 240
    while not rounds(place):
        assert loop.poll() is None, loop.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def descendants(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            yield child
            yield from descendants(child)


def words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.mark.parametrize("seconds_after_the_first_round", [0.5, 3.0, 5.5])
def test_a_killed_loop_leaves_no_process_and_continues_where_it_was(
    demo: DemoRun, tmp_path: Path, seconds_after_the_first_round: float
) -> None:
    place = make_place(tmp_path / "home")
    config = configure(tmp_path, demo)
    loop = start(config, place)
    wait_for_round(loop, place)
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


@pytest.mark.parametrize("is_whole", [False, True], ids=["engine", "whole_server"])
def test_a_crash_of_the_policy_server_costs_rollouts_and_not_the_run(
    demo: DemoRun, tmp_path: Path, is_whole: bool
) -> None:
    place = make_place(tmp_path / "home")
    loop = start(configure(tmp_path, demo), place)
    wait_for_round(loop, place)
    time.sleep(1.0)
    crashing = "trainspan_cli serve" if is_whole else "VLLM::EngineCore"
    (pid,) = (pid for pid in descendants(loop.pid) if crashing in words(pid))
    os.kill(pid, signal.SIGKILL)
    _, err = loop.communicate(timeout=400)
    # Until a whole server is back, each rollout fails at once: a round without any call raises the alarm.
    assert loop.returncode == 0 or is_whole, err[-3000:]
    assert "all 4 rounds are done" in err
    found = rounds(place)
    assert [record["round"] for record in found] == [1, 2, 3, 4]
    assert found[-1]["policy_version"] >= 3
    details = [check["detail"] for record in found for check in record["checks"]]
    assert any("1 policy server ended or came back" in detail for detail in details)

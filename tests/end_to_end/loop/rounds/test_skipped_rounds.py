"""Rounds with nothing to train on are skipped and counted; the loop continues, also after a kill."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT, Place, make_place, write_loop_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PLAN = ["same", "none", "crash", "mixed"]


def _records(place: Place) -> list[dict[str, Any]]:
    found = [path.read_text().splitlines() for path in (place.home / "runs").glob("*/rounds.jsonl")]
    return [json.loads(line) for lines in found for line in lines]


def _prepare(tmp_path: Path, agent: str, rounds: int) -> tuple[Place, dict[str, str], list[str]]:
    """A folder, and the environment and command of a loop on two tasks in it."""
    place = make_place(tmp_path / "home")
    calculator = tmp_path / "inputs"
    calculator.mkdir()
    make_tiny_model(calculator / "model")
    tasks = [json.dumps({"id": f"t{number}", "input": f"1 + {number}"}) for number in range(2)]
    (calculator / "tasks.jsonl").write_text("\n".join(tasks) + "\n")
    config = tmp_path / "trainspan.toml"
    write_loop_config(
        config,
        calculator,
        rollouts={"n": 4, "judge": ""},
        loop={
            "target": f"tests/end_to_end/loop/rounds/fickle_agent.py:{agent}",
            "rounds": rounds,
            "tasks_per_round": 2,
            "eval_tasks": 0,
            "val_tasks": 0,
            "eval_every": 0,
        },
    )
    config.write_text(config.read_text().replace('judge = ""\n', ""))
    environ = {**place.environ, "FICKLE_PLAN": str(tmp_path / "plan"), "FICKLE_COUNT": str(tmp_path / "count")}
    return place, environ, ["trainspan", "loop", "--config", str(config), "--resume", "--format", "json"]


def test_rollouts_that_never_reached_the_policy_cost_a_round_no_wait(tmp_path: Path) -> None:
    place, environ, command = _prepare(tmp_path, "solve_or_find_nobody", 1)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    records = [record for record in _records(place) if record["kind"] == "round"]
    assert len(records) == 1, done.stderr[-3000:]
    assert records[0]["rollout"]["status"] == {"agent_error": 4, "ok": 4}  # the server saw none of them
    assert (records[0]["dataset"]["rows"], records[0]["policy_version"]) == (4, 1)
    assert records[0]["seconds"]["dataset"] < 20, "they will not arrive: the 30 s wait is for rollouts that may"


def test_rounds_without_contrast_rewards_or_success_never_end_the_loop(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text(" ".join(PLAN))
    place, environ, command = _prepare(tmp_path, "solve", 4)
    killed = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not _records(place):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(3)
    # a round that was interrupted by the kill starts again
    (tmp_path / "count").write_bytes(b"." * 8 * len(_records(place)))
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    records = [record for record in _records(place) if record["kind"] == "round"]
    assert [record["round"] for record in records] == [1, 2, 3, 4], done.stderr[-3000:]
    same, none, crash, mixed = records
    assert same["skipped"] == "no contrast: none of 8 calls is trained (zero_spread_group 8)"
    assert none["skipped"].startswith("none of 8 calls in round 2")
    assert "no_reward (8)" in none["skipped"]
    assert crash["skipped"].startswith("no call was recorded of the 8 rollouts in round 3")
    assert crash["rollout"]["status"] == {"agent_error": 8}
    assert mixed["skipped"] is None
    assert [record["policy_version"] for record in records] == [0, 0, 0, 1]
    alarms = {check["name"]: check["detail"] for check in crash["checks"] if not check["ok"]}
    assert alarms["rounds train the policy"].startswith("skipped, 3 in a row: no call was recorded of the 8")
    assert not [check for record in (same, none, mixed) for check in record["checks"] if not check["ok"]]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert (summary["skipped_rounds"], summary["integrity"], done.returncode) == (3, False, 1)
    assert "3 of 4 rounds were skipped" in done.stderr

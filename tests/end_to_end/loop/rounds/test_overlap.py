"""The loop with rollouts one round ahead of training, on real processes: versions, checks, and kills at any moment."""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT, Place, make_place, write_loop_config
from trainspan_schemas.artifacts.dataset import dataset_dirs

pytestmark = pytest.mark.timeout(1500)

KILLS = 20


def prepare(tmp_path: Path, **loop: object) -> tuple[Place, dict[str, str], list[str]]:
    """A folder, and the environment and command of a loop on six tasks whose rollouts get 0 and 1 in turn."""
    place = make_place(tmp_path / "home")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_tiny_model(inputs / "model")
    tasks = [
        {"id": f"t{number}", "input": f"1 + {number}", "split": "train" if number < 4 else "val"} for number in range(6)
    ]
    (inputs / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = tmp_path / "trainspan.toml"
    chosen = {"tasks_per_round": 2, "eval_tasks": 0, "val_tasks": 2, "eval_every": 2, "overlap": 1, **loop}
    write_loop_config(
        config,
        inputs,
        rollouts={"n": 4, "judge": ""},
        train={"weights": "tests/end_to_end/loop/rounds/slow_weights.py:token_mean", "rollouts_per_step": 64},
        loop={"target": "tests/end_to_end/loop/rounds/fickle_agent.py:solve_slowly", **chosen},
    )
    config.write_text(config.read_text().replace('judge = ""\n', ""))
    environ = {**place.environ, "FICKLE_COUNT": str(tmp_path / "count")}
    return place, environ, ["trainspan", "loop", "--config", str(config), "--resume", "--format", "json"]


def records(place: Place) -> list[dict[str, Any]]:
    found = [path.read_text().splitlines() for path in (place.home / "runs").glob("*/rounds.jsonl")]
    return [json.loads(line) for lines in found for line in lines]


def rounds(place: Place) -> list[dict[str, Any]]:
    return [record for record in records(place) if record["kind"] == "round"]


def failed(place: Place) -> list[str]:
    """The checks that do not hold. Rewards in turn carry no signal, which is said from the fourth round on."""
    return [
        f"{check['name']}: {check['detail']}"
        for record in records(place)
        for check in record["checks"]
        if not check["ok"] and check["name"] != "rewards carry a signal"
    ]


def datasets(place: Place) -> list[pl.DataFrame]:
    (run,) = (place.home / "runs").iterdir()
    return [pl.read_parquet(folder / "*.parquet") for folder in dataset_dirs(run / "dataset")]


def versions(place: Place, split: str) -> dict[int, set[int]]:
    """Round → policy versions of its calls with this split."""
    query = f"SELECT round, list(DISTINCT policy_version) AS versions FROM calls WHERE split = '{split}' GROUP BY round"
    command = ["trainspan", "sql", query, "--store", str(place.home / "spans.duckdb"), "--format", "json"]
    done = subprocess.run(command, env=place.environ, capture_output=True, text=True, check=True)
    return {row["round"]: set(row["versions"]) for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
def test_rollouts_run_one_round_ahead_and_every_check_holds(tmp_path: Path) -> None:
    place, environ, command = prepare(tmp_path, rounds=3)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(record["kind"], record["round"]) for record in records(place)] == [
        *(("round", 1), ("round", 2), ("eval", 2), ("round", 3)),
    ]
    assert failed(place) == []
    assert [record["policy_version"] for record in rounds(place)] == [1, 2, 3]
    trained = versions(place, "train")
    for round_ in range(1, 4):
        # sampled once the round two before was trained, and trained by the version of the round before
        assert trained[round_] <= {max(0, round_ - 2), round_ - 1}
    assert any(len(found) == 2 for found in trained.values()), "no swap came while agents were at work"
    assert versions(place, "val") == {2: {2}}
    metrics = next(place.home.glob("runs/*/checkpoints/metrics.jsonl")).read_text().splitlines()
    assert all(line["agreement"]["fresh"] or line["agreement"]["moved"] for line in map(json.loads, metrics)), (
        "not judged"
    )
    ages = [(line["staleness_max"], line["old_policy"]) for line in map(json.loads, metrics)]
    assert ages[0] == (0, "logged")
    assert (1, "recompute") in ages
    assert max(age for age, _ in ages) == 1
    assert [frame["rollout_id"].n_unique() for frame in datasets(place)] == [8, 8, 8]


@pytest.mark.slow
def test_kills_at_any_moment_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    place, environ, command = prepare(tmp_path, rounds=30)
    generator = random.Random(19)
    kills = 0
    while kills < KILLS:
        loop = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        before, deadline = len(rounds(place)), time.monotonic() + 300
        while len(rounds(place)) == before and loop.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 4))
        if loop.poll() is not None:
            break
        os.kill(loop.pid, signal.SIGKILL)
        loop.communicate()
        kills += 1
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert kills == KILLS
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: rewards in turn carry no signal
    assert [record["round"] for record in rounds(place)] == list(range(1, 31))
    (run,) = (place.home / "runs").iterdir()
    ledger = map(json.loads, (run / "checkpoints" / "ledger.jsonl").read_text().splitlines())
    trained = Counter(entry["dataset"] for entry in ledger if entry["event"] == "trained")
    assert len(trained) == 30
    assert set(trained.values()) == {1}
    assert failed(place) == []
    calls = pl.concat([frame.select("trace_id", "span_id") for frame in datasets(place)])
    assert calls.is_unique().all(), "a call in two datasets"
    trained_versions = versions(place, "train")
    assert all(round_ - 2 <= min(found) and max(found) < round_ for round_, found in trained_versions.items())

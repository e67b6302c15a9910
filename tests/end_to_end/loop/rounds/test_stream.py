"""The loop without rounds in sampling, on real processes: batches of complete groups, slow rollouts, and kills."""

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

from tests.end_to_end.loop.rounds.test_overlap import datasets, failed, prepare, records, rounds, versions
from tests.support.places import ROOT, Place
from trainspan_processing.dataset.ledger import ledger_path
from trainspan_schemas.artifacts.dataset import dataset_dirs

pytestmark = pytest.mark.timeout(1500)

KILLS = 10


def seen(place: Place) -> pl.DataFrame:
    """One row per rollout that a dataset saw: `batch`, rollout_id, round (its draw), task_id, kept, reason."""
    (run,) = (place.home / "runs").iterdir()
    frames = []
    for folder in dataset_dirs(run / "dataset"):
        lines = map(json.loads, ledger_path(folder).read_text().splitlines())
        frames += [{"batch": int(folder.name.removeprefix("round-")), **line} for line in lines]
    return pl.DataFrame(frames, infer_schema_length=None).select(
        "batch", "rollout_id", "round", "task_id", "kept", "reason"
    )


@pytest.mark.ci
def test_batches_are_complete_groups_and_a_slow_rollout_holds_up_no_batch(tmp_path: Path) -> None:
    place, environ, command = prepare(
        tmp_path,
        rounds=4,
        eval_every=3,
        mode="stream",
        overlap=0,
        target="tests/end_to_end/loop/rounds/fickle_agent.py:solve_with_a_tail",
    )
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: rewards in turn carry no signal
    assert [(record["kind"], record["round"]) for record in records(place)] == [
        *(("round", 1), ("round", 2), ("round", 3), ("eval", 3), ("round", 4)),
    ]
    assert failed(place) == []
    named = [{check["name"] for check in record["checks"]} for record in rounds(place)]
    assert ["every call is stored" in names for names in named] == [False, False, True, True], (
        "counts of a quiet server"
    )
    assert all({"every drop is named", "rewards are those of the runner"} <= names for names in named)
    assert versions(place, "val") == {3: {3}}
    calls = pl.concat([frame.select("trace_id", "span_id") for frame in datasets(place)])
    assert calls.is_unique().all(), "a call in two datasets"
    groups = seen(place).filter(pl.col("kept") > 0).group_by("round", "task_id", "batch").len()
    assert set(groups["len"]) == {4}, "an incomplete group was used"
    batch_of = {(row["round"], row["task_id"]): row["batch"] for row in groups.iter_rows(named=True)}
    slow = min((round_, batch) for (round_, task), batch in batch_of.items() if task == "t1")
    beside = {batch for (round_, task), batch in batch_of.items() if round_ == slow[0] and task != "t1"}
    assert min(beside) < slow[1], "the slow group came later than the other one of its draw"
    metrics = next(place.home.glob("runs/*/checkpoints/metrics.jsonl")).read_text().splitlines()
    assert max(json.loads(line)["staleness_max"] for line in metrics) >= 1


@pytest.mark.slow
def test_kills_at_any_moment_of_a_stream_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    place, environ, command = prepare(
        tmp_path,
        rounds=15,
        eval_every=4,
        mode="stream",
        overlap=0,
        target="tests/end_to_end/loop/rounds/fickle_agent.py:solve_with_a_tail",
    )
    generator, kills = random.Random(19), 0
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
    assert [record["round"] for record in rounds(place)] == list(range(1, 16))
    assert failed(place) == []
    (run,) = (place.home / "runs").iterdir()
    ledger = map(json.loads, (run / "checkpoints" / "ledger.jsonl").read_text().splitlines())
    trained = Counter(entry["dataset"] for entry in ledger if entry["event"] == "trained")
    assert set(trained.values()) == {1}
    calls = pl.concat([frame.select("trace_id", "span_id") for frame in datasets(place)])
    assert calls.is_unique().all(), "a call in two datasets"
    sizes = seen(place).filter(pl.col("kept") > 0).group_by("round", "task_id").len()
    assert sizes["len"].max() == 4, "a draw was made twice"
    # What a kill cut off is stored, too: every complete rollout of the run was seen, except those after the last batch.
    assert set(complete(place)) - set(seen(place)["rollout_id"]) == set()


def complete(place: Place) -> list[str]:
    """Rollouts of complete groups in the store."""
    query = (
        "SELECT rollout_id FROM rollouts WHERE split = 'train' AND status = 'ok' "
        "QUALIFY count(*) OVER (PARTITION BY round, task_id) = 4"
    )
    command = ["trainspan", "sql", query, "--store", str(place.home / "spans.duckdb"), "--format", "json"]
    done = subprocess.run(command, env=place.environ, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return [row["rollout_id"] for row in found]

"""The loop with a policy for each of two agents: answered, trained, swapped and skipped each by itself, also after a kill."""

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

pytestmark = pytest.mark.timeout(900)

POLICIES = """
[policies.writer]
learning_rate = 2e-3
[policies.rewriter]
agents = "rewriter, unused"
lora_rank = 2
"""


def _prepare(tmp_path: Path, plan: str, *, sleep: bool = False) -> tuple[Place, list[str]]:
    """A folder with two tasks and a tiny model, and the command of a loop in it."""
    place = make_place(tmp_path / "home")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_tiny_model(inputs / "model")
    tasks = [json.dumps({"id": f"t{number}", "input": f"1 + {number}"}) for number in range(2)]
    tasks.append(json.dumps({"id": "held-out", "input": "2 + 2", "split": "val"}))
    (inputs / "tasks.jsonl").write_text("\n".join(tasks) + "\n")
    (tmp_path / "plan").write_text(plan)
    config = tmp_path / "trainspan.toml"
    write_loop_config(
        config,
        inputs,
        serving={"sleep": sleep},
        rollouts={"n": 4, "judge": ""},
        model={"adapter": "lora", "lora_rank": 4},
        train={"learning_rate": 1e-3, "rollouts_per_step": 64, "warmup_rounds": 0},
        loop={
            "target": "tests/end_to_end/loop/policies/team_agent.py:solve",
            "rounds": len(plan.split()),
            "tasks_per_round": 2,
            "eval_tasks": 1,
            "val_tasks": 0,
            "eval_every": 0,
        },
    )
    config.write_text(config.read_text().replace('judge = ""\n', "") + POLICIES)
    place.environ.update({"TEAM_PLAN": str(tmp_path / "plan"), "TEAM_COUNT": str(tmp_path / "count")})
    return place, ["trainspan", "loop", "--config", str(config), "--resume", "--format", "json"]


def _records(place: Place, kind: str = "round") -> list[dict[str, Any]]:
    found = [path.read_text().splitlines() for path in (place.home / "runs").glob("*/rounds.jsonl")]
    return [record for lines in found for record in map(json.loads, lines) if record["kind"] == kind]


def _run(place: Place, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=ROOT, env=place.environ, capture_output=True, text=True, timeout=600, check=False
    )


def _sql(place: Place, query: str) -> list[list[Any]]:
    done = _run(place, "trainspan", "sql", query, "--store", str(place.home / "spans.duckdb"), "--format", "json")
    assert done.returncode == 0, done.stderr
    return [list(json.loads(line).values()) for line in done.stdout.splitlines()]


def _failed(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(check["name"], check["detail"]) for record in records for check in record["checks"] if not check["ok"]]


@pytest.mark.ci
def test_each_agent_is_answered_by_its_own_policy_which_is_trained_swapped_and_skipped_alone(tmp_path: Path) -> None:
    place, command = _prepare(tmp_path, "writer+rewriter writer+stranger writer+editor")
    done = _run(place, *command)
    records = _records(place)
    assert done.returncode == 0, (done.stderr[-3000:], _failed(records))
    assert _failed(records) == []
    first, second, third = (record["policies"] for record in records)
    assert {name: one["policy_version"] for name, one in first.items()} == {"writer": 1, "rewriter": 1}
    assert {name: one["policy_version"] for name, one in second.items()} == {"writer": 2, "rewriter": 1}
    assert {name: one["policy_version"] for name, one in third.items()} == {"writer": 3, "rewriter": 2}
    rates = [(one["train"]["learning_rate"], one["train"]["rows"]) for one in first.values()]
    assert rates == [(2e-3, 8), (1e-3, 8)]

    # The rewriter has no call in round 2: it alone is skipped, and the stranger's calls have no policy.
    assert [one["skipped"] is None for one in second.values()] == [True, False]
    assert second["rewriter"]["skipped"].startswith("none of 16 calls in round 2")
    assert "other_policy (16)" in second["rewriter"]["skipped"]
    assert records[1]["skipped"] is None
    assert (records[1]["dataset"]["calls_seen"], records[1]["dataset"]["dropped"]) == (16, {"other_policy": 8})
    assert (records[0]["dataset"]["calls_kept"], records[0]["dataset"]["dropped"]) == (16, {})

    # The editor names the rewriter's policy as its model.
    calls = _sql(
        place,
        "SELECT round, agent, policy_name, policy_version, count(*) FROM calls WHERE split = 'train' GROUP BY ALL ORDER BY ALL",
    )
    assert calls == [
        [1, "rewriter", "rewriter", 0, 8],
        [1, "writer", "writer", 0, 8],
        [2, "stranger", "policy", 0, 8],
        [2, "writer", "writer", 1, 8],
        [3, "editor", "rewriter", 1, 8],
        [3, "writer", "writer", 2, 8],
    ]

    # A validation has the versions of both, and the best one is kept as a folder to serve from.
    before, after = _records(place, "eval")
    assert [one["policy_version"] for one in before["policies"].values()] == [0, 0]
    assert [one["policy_version"] for one in after["policies"].values()] == [3, 2]
    assert (before["mean"], after["mean"], _failed([before, after])) == (0.0, 1.0, [])
    (best,) = (place.home / "runs").glob("*/best/*")
    assert [(best / policy / "latest").read_text() for policy in ("writer", "rewriter")] == [
        "policy-000003\n",
        "policy-000002\n",
    ]

    # Checks, files and figures name the policy.
    names = {check["name"] for check in records[0]["checks"]}
    for policy in ("writer", "rewriter"):
        assert f"{policy}: server and trainer agree" in names
        assert f"{policy}: the swap is fresh" in names
        assert f"{policy}: rewards are those of the runner" in names
    folder = Path(json.loads(done.stdout.strip().splitlines()[-1])["folder"])
    assert (folder / "checkpoints/writer/latest").read_text() == "policy-000003\n"
    assert (folder / "checkpoints/rewriter/latest").read_text() == "policy-000002\n"
    assert not (folder / "dataset/rewriter/round-0002").exists()
    lines = (folder / "rounds.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in lines[:5]] == [
        ["round", "policy", "policy_version"],
        ["1", "writer", "1"],
        ["1", "rewriter", "1"],
        ["2", "writer", "2"],
        ["2", "rewriter", "1"],
    ]
    shown = _run(place, "trainspan", "status", "--config", command[3]).stdout
    assert "writer version 3" in shown
    assert "rewriter version 2" in shown
    report = (folder / "report.html").read_text()
    assert "writer" in report
    assert "rewriter" in report


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [False, True])
def test_a_loop_with_policies_that_is_killed_trains_each_dataset_once(tmp_path: Path, sleep: bool) -> None:
    """Killed as soon as the first policy of round 2 has a new checkpoint. If the server sleeps, the policies take turns."""
    place, command = _prepare(tmp_path, "writer+rewriter writer+rewriter writer+rewriter", sleep=sleep)
    killed = subprocess.Popen(
        command, cwd=ROOT, env=place.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 400
    while not list(place.home.glob("runs/*/checkpoints/*/policy-000002")):
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(3)
    done = _run(place, *command)
    records = _records(place)
    assert [record["round"] for record in records] == [1, 2, 3], done.stderr[-3000:]
    assert done.returncode == 0, _failed(records)
    assert [one["policy_version"] for one in records[-1]["policies"].values()] == [3, 3]
    (run,) = (place.home / "runs").iterdir()
    for policy in ("writer", "rewriter"):
        metas = [
            json.loads((run / f"checkpoints/{policy}/policy-{version:06d}/trainspan.json").read_text())
            for version in (1, 2, 3)
        ]
        assert len({meta["dataset_sha256"] for meta in metas}) == 3
        assert [meta["policy"] for meta in metas] == [policy] * 3
    assert len((tmp_path / "count").read_bytes()) == 24, "no rollout was repeated"
    for round_ in (1, 3) if sleep else ():
        trained = (run / f"checkpoints/writer/policy-{round_:06d}").stat().st_mtime_ns
        built = (run / f"dataset/rewriter/round-{round_:04d}").stat().st_mtime_ns
        assert built > trained, "the second policy waits for the first one"

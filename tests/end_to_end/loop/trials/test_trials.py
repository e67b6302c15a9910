"""A new version that is worse is refused by itself, on real processes: in rounds, ahead of training, as a stream, and killed."""

import csv
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.end_to_end.loop.rounds.test_live import trained_rollouts, users_of, wait_for_rounds
from tests.end_to_end.loop.rounds.test_overlap import failed, rounds
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT, Place, make_place, write_loop_config
from trainspan_schemas.artifacts.checkpoint import checkpoint_name

pytestmark = [pytest.mark.timeout(900), pytest.mark.ci]

TRIALS = 6
"""1/64 is the smallest p, below half of the level."""


def prepare(
    tmp_path: Path, plan: str, *, seconds: float = 0, **loop: object
) -> tuple[Place, dict[str, str], list[str]]:
    """A folder, and the environment and command of a loop whose trial tasks are rewarded by the plan."""
    place = make_place(tmp_path / "home")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_tiny_model(inputs / "model")
    train = [{"id": f"t{number}", "input": f"1 + {number}"} for number in range(4)]
    trial = [{"id": f"trial-{number}", "input": f"2 + {number}", "split": "val"} for number in range(TRIALS)]
    for name, tasks in (("tasks", train), ("trial", trial)):
        (inputs / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "plan").write_text(plan)
    config = tmp_path / "trainspan.toml"
    chosen = {"tasks_per_round": 2, "eval_tasks": 0, "val_tasks": 0, "eval_every": 0, **loop}
    write_loop_config(
        config,
        inputs,
        rollouts={"n": 4, "judge": ""},
        train={"rollouts_per_step": 64},
        loop={
            "target": "tests/end_to_end/loop/trials/planned_agent.py:solve",
            "trial_tasks": str(inputs / "trial.jsonl"),
            **chosen,
        },
    )
    config.write_text(config.read_text().replace('judge = ""\n', ""))
    environ = {
        **place.environ,
        "PLANNED_COUNT": str(tmp_path / "count"),
        "PLANNED_REWARDS": str(tmp_path / "plan"),
        "PLANNED_SECONDS": str(seconds),
    }
    return place, environ, ["trainspan", "loop", "--config", str(config), "--resume", "--format", "json"]


def parents(place: Place) -> dict[str, str]:
    """Checkpoint → its parent, of the checkpoints that are kept."""
    found = (json.loads(path.read_text()) for path in place.home.glob("runs/*/checkpoints/policy-*/trainspan.json"))
    return {f"policy-{meta['version']:06d}": meta["parent"] for meta in found}


def latest(place: Place) -> str:
    return next(place.home.glob("runs/*/checkpoints/latest")).read_text().strip()


@pytest.mark.parametrize(
    "how", [{"overlap": 1}, pytest.param({"mode": "stream"}, marks=pytest.mark.slow)], ids=["overlap", "stream"]
)
def test_versions_that_are_worse_are_refused_while_other_rollouts_go_on(tmp_path: Path, how: dict[str, object]) -> None:
    # Version 1 fails where the model that the run starts from did not; version 2, made from that model, is as good as it.
    place, environ, command = prepare(tmp_path, "1 0 1 crash", rounds=3, **how)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stderr[-3000:], failed(place))
    worse, good, broken = rounds(place)
    assert [record["policy_version"] for record in (worse, good, broken)] == [0, 2, 2]
    assert worse["refused"].startswith("version 1 is worse than version 0: reward 1.000 → 0.000 on 6 tasks (p = 0.0")
    assert good["refused"] is None
    assert broken["refused"].startswith("version 3 is worse than version 2: ")
    assert "finished rollouts 1.000 → 0.000 on 6 tasks" in broken["refused"]
    assert latest(place) == "policy-000002"
    assert parents(place)["policy-000002"] == "policy-000000"
    assert parents(place)["policy-000003"] == "policy-000002"
    assert failed(place) == []
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert (summary["refused_rounds"], summary["integrity"]) == (2, True)
    assert "2 of 3 new versions were refused, the last one: version 3 is worse than version 2" in done.stderr
    (run,) = (place.home / "runs").iterdir()
    rows = list(csv.DictReader((run / "rounds.csv").open()))
    assert [bool(row["refused"]) for row in rows] == [True, False, True]
    assert "refused versions" in (run / "report.html").read_text()
    status = subprocess.run(["trainspan", "status"], env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "2 versions refused, the last in round 3: version 3 is worse" in status.stdout


@pytest.mark.slow
def test_a_loop_killed_around_a_trial_comes_to_the_same_end(tmp_path: Path) -> None:
    place, environ, command = prepare(tmp_path, "1 0 1", seconds=1, rounds=2)

    def is_on_trial(version: int) -> bool:
        return any(path.read_text().strip() == checkpoint_name(version) for path in runs("checkpoints/latest"))

    def runs(name: str) -> list[Path]:
        return list(place.home.glob(f"runs/*/{name}"))

    moments = [
        lambda: bool(
            list(place.home.glob("rollouts/*-trial/round-0000-val.jsonl"))
        ),  # the trial of the model at the start
        lambda: is_on_trial(1),  # after the swap to version 1
        lambda: bool(list(place.home.glob("rollouts/*-trial/round-0001-val.jsonl"))),  # in its trial
        lambda: bool(runs("trials/round-0001.json")),  # while the model at the start goes back in service
        lambda: bool(runs("trials/round-0001-version-000000.json")),  # after that, before the record
        lambda: is_on_trial(2),
    ]
    for is_now in moments:
        loop = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 300
        while not is_now() and loop.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        loop.kill()
        loop.communicate()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stderr[-3000:], failed(place))
    assert [(record["round"], record["policy_version"], bool(record["refused"])) for record in rounds(place)] == [
        *((1, 0, True), (2, 2, False)),
    ]
    assert parents(place)["policy-000002"] == "policy-000000"
    ledger = [json.loads(line) for line in runs("checkpoints/ledger.jsonl")[0].read_text().splitlines()]
    assert [entry["checkpoint"] for entry in ledger if entry["event"] == "withdrawn"] == ["policy-000001"]
    assert len([entry for entry in ledger if entry["event"] == "trained" and entry["dataset"]]) == 2


@pytest.mark.slow
def test_users_get_the_version_before_back_and_none_of_their_requests_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, planned, _ = prepare(tmp_path, "1 1 0 1 1 1 1 1")
    place = make_place(tmp_path / "live")
    place = replace(
        place, environ={**place.environ, **{name: planned[name] for name in planned if name.startswith("PLANNED")}}
    )
    tried = {
        "val_target": "tests/end_to_end/loop/trials/planned_agent.py:solve",
        "trial_tasks": str(tmp_path / "inputs" / "trial.jsonl"),
        "eval_tasks": 0,
        "eval_every": 0,
    }
    with users_of(tmp_path, place, monkeypatch, tasks=tmp_path / "inputs" / "trial.jsonl", **tried) as traffic:
        found = wait_for_rounds(place, 3, traffic.loop)
    assert traffic.crowd.failures == []
    assert failed(place) == []
    assert [(record["policy_version"], bool(record["refused"])) for record in found[:3]] == [
        *((1, False), (1, True), (3, False)),
    ]
    assert parents(place)["policy-000003"] == "policy-000001"
    trained = trained_rollouts(place)
    assert len(trained) == len(set(trained)), "a rollout in two datasets"

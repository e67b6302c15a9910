"""The loop with server and trainer in bfloat16: its panel is green, and faults turn it red."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT, DemoRun, Place, make_place, write_loop_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def start(place: Place, calculator: Path, folder: Path, **loop: object) -> "subprocess.Popen[str]":
    config = folder / "trainspan.toml"
    write_loop_config(
        config,
        calculator,
        serving={"dtype": "bfloat16"},
        model={"dtype": "bfloat16"},
        train={"learning_rate": 3e-4},
        loop={"tasks_per_round": 32, **loop},
    )
    faults = {
        "PYTHONPATH": f"{ROOT / 'tests/support/policy_server/fault_site'}",
        "TRAINSPAN_TEST_FAULT": str(folder / "fault"),
    }
    return subprocess.Popen(
        ["trainspan", "loop", "--config", str(config), "--format", "json"],
        cwd=ROOT,
        env={**place.environ, **faults},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(place: Place) -> list[dict[str, Any]]:
    files = list(place.home.glob("runs/*/rounds.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def rounds(place: Place) -> list[dict[str, Any]]:
    return [record for record in records(place) if record["kind"] == "round"]


def failed(record: dict[str, Any]) -> list[str]:
    return [check["name"] for check in record["checks"] if not check["ok"]]


def test_it_learns_and_its_panel_is_green(demo: DemoRun, tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    loop = start(place, demo.place.home / "calculator", tmp_path, rounds=10, eval_tasks=200, eval_every=0)
    _, err = loop.communicate(timeout=1000)
    assert loop.returncode == 0, err[-3000:]
    assert [failed(record) for record in records(place)] == [[]] * len(records(place))
    assert [record["policy_version"] for record in rounds(place)] == list(range(1, 11))
    (details,) = {
        check["detail"].rpartition(", server ")[2]
        for record in rounds(place)
        for check in record["checks"]
        if check["name"] == "server and trainer agree"
    }
    assert details == "bfloat16, trainer bfloat16"
    canaries = [record["train"]["swap"]["canary"] for record in rounds(place)]
    assert {(canary["status"], canary["dtype"], canary["tensors_differing"]) for canary in canaries} == {
        ("fresh", "bfloat16", 0)
    }
    before, after = (record["mean"] for record in records(place) if record["kind"] == "eval")
    assert after > before + 0.1
    metrics = next(place.home.glob("runs/*/checkpoints/metrics.jsonl")).read_text().splitlines()
    assert {json.loads(line)["old_policy"] for line in metrics} == {"recompute"}


def test_weights_that_are_not_loaded_turn_it_red(demo: DemoRun, tmp_path: Path) -> None:
    """First the canary detects it and the round is aborted; then, with a blind canary, the panel does."""
    place = make_place(tmp_path / "home")
    (tmp_path / "fault").write_text("frozen")
    loop = start(place, demo.place.home / "calculator", tmp_path, rounds=6, eval_tasks=0, eval_every=0)
    try:
        deadline = time.monotonic() + 400
        while not rounds(place) and time.monotonic() < deadline and loop.poll() is None:
            time.sleep(0.2)
        (tmp_path / "fault").write_text("blind")
        _, err = loop.communicate(timeout=600)
    finally:
        loop.kill()
    assert loop.returncode == 1, err[-3000:]
    first, *later = rounds(place)
    assert failed(first) == ["the swap is fresh"]
    assert "does not compute with" in first["train"]["swap"]["error"]
    assert first["policy_version"] == 0
    assert failed(later[0]) == [], "sampled before the first undetected skipped load"
    assert later[0]["train"]["agreement"]["server_dtype"] == "bfloat16"
    assert later[0]["train"]["agreement"]["trainer_dtype"] == "bfloat16"
    assert "server and trainer agree" in failed(later[-1]), "the policy may also have moved beyond max_kl"

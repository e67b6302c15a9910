"""The loop with a trainer of several processes that split the weights (gloo)."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT, DemoRun, make_place, write_loop_config
from tests.training.support.processes.pair import FSDP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_two_processes_train_what_the_server_then_serves(demo: DemoRun, tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    config = write_loop_config(
        tmp_path / "trainspan.toml",
        demo.place.home / "calculator",
        train={"learning_rate": 1e-4},
        loop={"rounds": 2, "tasks_per_round": 16, "eval_tasks": 20, "eval_every": 0},
        advanced={"loop.trainer_processes": 2},
    )
    done = subprocess.run(
        ["trainspan", "loop", "--config", str(config), "--format", "json"],
        cwd=ROOT,
        env=place.environ | FSDP,
        capture_output=True,
        text=True,
        timeout=640,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(json.loads(done.stdout.strip().splitlines()[-1])["folder"])
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [record for record in rounds if record["kind"] == "round"]
    assert not [check for record in rounds for check in record["checks"] if not check["ok"]]
    assert [record["train"]["swap"]["canary"]["status"] for record in rounds] == ["fresh", "fresh"]
    for version in (1, 2):
        names = sorted(path.name for path in folder.glob(f"checkpoints/policy-{version:06d}/*.safetensors"))
        assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert len(list((folder / f"checkpoints/optimizer/policy-{version:06d}").iterdir())) == 2

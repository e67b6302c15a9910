"""`trainspan loop --seeds`: real runs of two seeds, with several validation rollouts per task, compared."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT, DemoRun, make_place, write_loop_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_two_seeds_run_one_after_the_other_and_are_compared(demo: DemoRun, tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    calculator = demo.place.home / "calculator"
    config = tmp_path / "trainspan.toml"
    write_loop_config(
        config,
        calculator,
        loop={
            "rounds": 1,
            "tasks_per_round": 16,
            "eval_tasks": 20,
            "val_tasks": 20,
            "eval_every": 1,
            "eval_n": 4,
        },
    )
    command = ["trainspan", "loop", "--config", str(config), "--seeds", "2", "--format", "json"]
    done = subprocess.run(
        command, cwd=ROOT, env=place.environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *summaries, compared = map(json.loads, done.stdout.strip().splitlines())
    assert len(summaries) == 2
    (series,) = compared
    assert series["settings"] == "all"
    assert [run["seed"] for run in series["runs"]] == [0, 1]
    assert {run["alarms"] for run in series["runs"]} == {0}
    for summary in summaries:
        folder = Path(summary["folder"])
        run = json.loads((folder / "run.json").read_text())
        assert run["ended"] == "all 1 rounds are done"
        records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        evals = [record for record in records if record["kind"] == "eval"]
        assert all(record["n"] == 20 and record["status"] == {"ok": 80} for record in evals)
        for record in evals:
            passes = [record["pass_at"][k] for k in ("1", "2", "4")]
            assert passes == sorted(passes)
            assert passes[0] == pytest.approx(record["mean"])
        start, end = evals
        if end["mean"] > start["mean"]:
            assert run["best"]["round"] == 1
            assert (Path(run["best"]["checkpoint"]) / "model.safetensors").exists()
        else:
            assert "best" not in run  # the initial model is not a checkpoint of the run
    (page,) = (place.home / "runs").glob("series-*.html")
    assert 'aria-label="held-out' in page.read_text()

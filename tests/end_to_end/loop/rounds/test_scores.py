"""The loop with rewards other than successes: negative ones, and ones far above 1."""

import csv
import json
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT, DemoRun, make_place, write_loop_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

JUDGE = """
def score(task, result):
    return 100.0 if result.value == task["answer"] else -3.5
"""


def test_a_run_with_rewards_of_100_and_minus_3_5_ends_with_its_validations(demo: DemoRun, tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    config = write_loop_config(
        tmp_path / "trainspan.toml",
        demo.place.home / "calculator",
        rollouts={"judge": f"{judge}:score"},
        loop={"rounds": 1, "tasks_per_round": 16, "eval_tasks": 24, "eval_n": 2},
    )
    command = ["trainspan", "loop", "--config", str(config)]
    done = subprocess.run(
        command, cwd=ROOT, env=place.environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (place.home / "runs").iterdir()
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert all(check["ok"] for record in records for check in record["checks"])
    start, _, end = records
    for record in (start, end):
        assert (record["kind"], record["n"], record["binary"]) == ("eval", 24, False)
        solved = (record["mean"] * 48 + 3.5 * 48) / 103.5  # rollouts that got 100
        assert solved == pytest.approx(round(solved))
        assert 0 < solved < 48
        assert record["pass_at"]["1"] == pytest.approx(solved / 48)
    page = (folder / "report.html").read_text()
    assert ">reward</th>" in page
    assert "reward after each round" in page
    (line,) = csv.DictReader((folder / "rounds.csv").open())
    assert float(line["validation"]) == end["mean"]
    wide = {**place.environ, "COLUMNS": "200"}
    for command in (["trainspan", "status"], ["trainspan", "compare", folder.name]):
        shown = subprocess.run(command, cwd=ROOT, env=wide, capture_output=True, text=True, check=True).stdout
        assert f"{end['mean']:.3f} [" in shown

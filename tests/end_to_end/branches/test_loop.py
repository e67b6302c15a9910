"""A loop that branches its rollouts in every round and trains on the measured values and on the branches themselves."""

import json
import os
import subprocess
from pathlib import Path

import polars as pl
import pytest

from tests.support.agents.letters import AGENT, JUDGE
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT, make_place
from trainspan_processing.dataset.published import open_published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
[rollouts]
tasks = "tasks.jsonl"
judge = "judge.py:score"
n = 4
[dataset]
credit = "vine"
[train]
model = "model"
rollouts_per_step = 64
[loop]
target = "agent.py:solve"
rounds = 2
tasks_per_round = 3
branches = 3
branch_calls = "random:0.9"
branch_rollouts = 8
eval_tasks = 0
eval_every = 0
"""


def test_a_loop_measures_values_and_trains_on_them_and_on_the_branches(tmp_path: Path) -> None:
    place = make_place(tmp_path / "home")
    make_tiny_model(tmp_path / "model", seed=3)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "judge.py").write_text(JUDGE)
    tasks = [{"id": f"t{number}", "input": "letters", "split": "train"} for number in range(6)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "trainspan.toml").write_text(CONFIG)
    environ = {**place.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        ["trainspan", "loop"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=700, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = (place.home / "runs").iterdir()
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [record for record in rounds if record["kind"] == "round"]
    assert [record["round"] for record in rounds] == [1, 2]
    for record in rounds:
        assert all(check["ok"] for check in record["checks"]), record["checks"]
        branches = record["rollout"]["branches"]
        assert branches["status"] == {"ok": branches["total"]}
        assert 0 < branches["total"] <= 8 * 2 * 3
        assert record["dataset"]["dropped"]["forced"] > 0
        assert record["rollout"]["sampled_tokens"] == 3 * 4 * 3 + branches["sampled_tokens"]
    datasets = [open_published(next(folder.glob(f"**/round-000{number}"))) for number in (1, 2)]
    assert [dataset.manifest["ignored_values"] for dataset in datasets] == [0, 0]
    rows = pl.concat(dataset.rows(["task_id", "advantage"]) for dataset in datasets)
    assert rows.filter(pl.col("task_id").str.contains("@")).height > 0, "branches are data"
    assert rows.filter(~pl.col("task_id").str.contains("@"))["advantage"].n_unique() > 1

"""Several processes share the tasks of a run, each with its own ledger."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollouts.agents.test_functions import rollouts, tasks
from tests.rollouts.conftest import Run
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_cli.doctor.rollouts_overview import rollouts_overview
from trainspan_rollouts.ledger.paths import ledger_files, run_folder
from trainspan_rollouts.ledger.recorded import task_outcomes
from trainspan_rollouts.records import Shard
from trainspan_schemas.errors import UsageError
from trainspan_schemas.telemetry import keys

SOURCE = "def solve(task): return float(task['id'])"


@given(tasks=st.integers(0, 50), count=st.integers(1, 60))
def test_shards_have_every_task_once_and_differ_by_at_most_one(tasks: int, count: int) -> None:
    shards = [Shard(index, count) for index in range(count)]
    sizes = [shard.size(tasks) for shard in shards]
    assert sum(sizes) == tasks
    assert max(sizes) - min(sizes) <= 1
    assert [Shard.parse(str(shard)) for shard in shards] == shards


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "1/0", "a/b", "1/2/3", "٠/2"])
def test_another_text_is_no_shard(text: str) -> None:
    with pytest.raises(UsageError, match="must be i/n, with i from 0 to n-1"):
        Shard.parse(text)


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_runs_have_two_folders(one: str, other: str) -> None:
    assert run_folder("exp/1") != run_folder("exp_1")
    assert (run_folder(one) == run_folder(other)) == (one == other)
    for name in (one, "..", ".", "../../etc", ".hidden", "%2E"):
        assert run_folder(name).parent == run_folder("run").parent
        assert not run_folder(name).name.startswith(".")


def test_each_shard_runs_whole_groups_of_its_tasks_and_all_are_seen_as_one(
    run: Run, recorder: OtlpRecorder, home: Path
) -> None:
    given = tasks(*range(5))
    first = run(SOURCE, given, "agent:solve", n=2, shard=Shard(0, 3), limit=4)
    assert (first.total, first.status, first.mean_reward) == (4, {"ok": 4}, 1.5)  # tasks 0 and 3
    third = run(SOURCE, given, "agent:solve", n=2, shard=Shard(2, 3), limit=4)
    assert (third.total, third.mean_reward) == (2, 2.0)
    found = rollouts_overview()
    assert found is not None
    assert (found["run_id"], found["part"], found["shards"]) == ("run", "round-0000", 3)
    assert (found["missing_shards"], found["begun"], found["ended"]) == ([1], 6, 6)
    assert found["mean_reward"] == (0 + 0 + 3 + 3 + 2 + 2) / 6
    run(SOURCE, given, "agent:solve", n=2, shard=Shard(1, 3), limit=4)
    found = rollouts_overview()
    assert found is not None
    assert (found["missing_shards"], found["status"]) == ([], {"ok": 8})
    outcomes = {task: own for file in ledger_files("run", 0, None) for task, own in task_outcomes(file).items()}
    assert {task: [outcome.reward for outcome in own] for task, own in outcomes.items()} == {
        "0": [0, 0],
        "1": [1, 1],
        "2": [2, 2],
        "3": [3, 3],
    }
    spans = recorder.named("trainspan.rollout")
    assert Counter(span.attributes[keys.TASK_ID] for span in spans) == {"0": 2, "1": 2, "2": 2, "3": 2}
    assert {span.attributes[keys.RUN_ID] for span in spans} == {"run"}


def test_the_same_command_begins_a_shard_and_resumes_it(run: Run, recorder: OtlpRecorder) -> None:
    again = {"shard": Shard(1, 2), "resume": True}
    assert run(SOURCE, tasks(*range(4)), "agent:solve", **again).resumed == 0
    assert run(SOURCE, tasks(*range(4)), "agent:solve", **again).resumed == 2
    assert sorted(rollouts(recorder)) == [("1", 0), ("3", 0)]
    with pytest.raises(UsageError, match="was begun with 2 shards, not 3"):
        run(SOURCE, tasks(*range(4)), "agent:solve", shard=Shard(0, 3))
    with pytest.raises(UsageError, match="was begun with 2 shards, not 1"):
        run(SOURCE, tasks(*range(4)), "agent:solve")
    assert run(SOURCE, tasks(0), "agent:solve", shard=Shard(1, 2), round=1).total == 0


@pytest.mark.ci
def test_a_ledger_belongs_to_one_process_at_a_time(run: Run) -> None:
    source = """
    def solve(task):
        import os, subprocess, sys
        command = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", "tasks.jsonl", "--run", "run"]
        environ = {**os.environ, "TRAINSPAN_HOME": "home"}
        done = subprocess.run([*command, "--resume", "agent:solve"], capture_output=True, text=True, env=environ)
        return float(done.returncode == 2 and "another process runs these rollouts" in done.stderr)
    """
    assert run(source, tasks("x"), "agent:solve").mean_reward == 1.0


def test_a_shard_needs_a_run_and_a_task_file(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "1", "input": "x"}) + "\n")
    command = [sys.executable, "-m", "trainspan_cli", "rollout", "--shard", "0/2"]
    for more, message in (
        (["--tasks", "tasks.jsonl"], "give all parts the same --run"),
        (["--tasks", "-", "--run", "r"], "--shard divides a task file"),
    ):
        done = subprocess.run(
            [*command, *more, "true"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr

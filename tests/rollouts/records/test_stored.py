"""The records of the runner and its agents in the real collector's views."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rollouts.conftest import write_tasks
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment, write
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_schemas.store.access import running_collector

TRAINSPAN = [sys.executable, "-m", "trainspan_cli"]
QUERY = "SELECT run_id, task_id, status, reward FROM rollouts ORDER BY ALL"
SOURCE = """
import openai, trainspan
from opentelemetry import trace

def solve(task):
    openai.OpenAI().chat.completions.create(model="policy", messages=[])
    match task["input"]:
        case "return":
            return 0.25
        case "api":
            trainspan.reward(0.5)
        case "plain":
            trace.get_current_span().add_event(
                "gen_ai.evaluation.result", {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 2}
            )
        case "raise":
            raise KeyError("gone")

def judge(task, result):
    return 0.125
"""


@pytest.mark.ci
def test_the_stored_rollouts_have_the_rewards_and_statuses_of_the_run(
    tmp_path: Path, home: Path, policy: OpenAIServer
) -> None:
    store = home / "spans.duckdb"
    write(tmp_path, SOURCE)
    path = write_tasks(tmp_path, *({"id": name, "input": name} for name in ("return", "api", "plain", "raise", "none")))
    collector = subprocess.Popen(
        [
            *TRAINSPAN,
            "collector",
            "--store",
            str(store),
            "--grpc",
            "127.0.0.1:0",
            "--http",
            "off",
            "--flight",
            "127.0.0.1:0",
        ],
        env=environment({"TRAINSPAN_HOME": str(home)}),
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 30
        while (address := running_collector(store)) is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert address is not None
        target = (f"{tmp_path}/agent.py:solve",)
        common = {"n": 1, "policy_url": policy.url, "collector": f"http://{address.grpc}"}
        run_rollouts(RunSettings(path, target, "plain", **common))  # type: ignore[arg-type]
        judge = f"{tmp_path}/agent.py:judge"
        run_rollouts(RunSettings(path, target, "judged", judge=judge, **common))  # type: ignore[arg-type]
        done = subprocess.run(
            [*TRAINSPAN, "sql", "--store", str(store), "--format", "json", QUERY],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        collector.terminate()
        assert collector.wait(30) == 0
    rows = map(json.loads, done.stdout.splitlines())
    assert [tuple(row.values()) for row in rows] == [
        ("judged", "api", "ok", 0.125),
        ("judged", "none", "ok", 0.125),
        ("judged", "plain", "ok", 0.125),
        ("judged", "raise", "agent_error", None),
        ("judged", "return", "ok", 0.125),
        ("plain", "api", "ok", 0.5),
        ("plain", "none", "ok", None),
        ("plain", "plain", "ok", 2.0),
        ("plain", "raise", "agent_error", None),
        ("plain", "return", "ok", 0.25),
    ]

"""The whole loop with a rubric for a judge, whose model is a real server with scripted verdicts: what is trained, stored and checked."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.places import ROOT, DemoRun, Place, make_place, write_loop_config
from trainspan_schemas.telemetry.keys import REWARD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

RUBRIC = """
model = "judge"
base_url = "{url}"
sees = ["task", "reference", "answer"]

[[criteria]]
name = "correct"
question = "Is the answer the number of the reference?"
"""
CRITERION = "correct"
ROLLOUTS = 2 * 16 * 8 + 2 * 20
"""Two rounds of 16 tasks with 8 rollouts each, and two validations of 20 tasks."""


def part(name: str, asked: str) -> str | None:
    match = re.search(rf"<({name}-[0-9a-f]{{8}})>\n(.*?)\n</\1>", asked, re.DOTALL)
    return match and match[2]


def verdict(body: dict[str, Any]) -> str:
    asked = body["messages"][-1]["content"]
    is_right = part("reference", asked) == part("answer", asked)
    return json.dumps({"correct": {"reason": "as the reference" if is_right else "another", "score": 10 * is_right}})


@pytest.fixture
def model() -> Iterator[OpenAIServer]:
    with OpenAIServer(answer=verdict) as server:
        yield server


def sql(place: Place, query: str) -> list[dict[str, Any]]:
    command = ["trainspan", "sql", "--format", "json", query]
    done = subprocess.run(command, cwd=ROOT, env=place.environ, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_rubric_rewards_the_whole_loop_with_a_stored_reason_for_each_rollout(
    demo: DemoRun, model: OpenAIServer, tmp_path: Path
) -> None:
    place = make_place(tmp_path / "home")
    (tmp_path / "rubric.toml").write_text(RUBRIC.format(url=model.url))
    config = write_loop_config(
        tmp_path / "trainspan.toml",
        demo.place.home / "calculator",
        rollouts={"judge": str(tmp_path / "rubric.toml")},
        train={"learning_rate": 1e-4},
        loop={"rounds": 2, "tasks_per_round": 16, "eval_tasks": 20, "eval_every": 0},
    )
    command = ["trainspan", "loop", "--config", str(config), "--format", "json"]
    done = subprocess.run(
        command, cwd=ROOT, env=place.environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(json.loads(done.stdout.strip().splitlines()[-1])["folder"])
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [record for record in records if record["kind"] == "round"]
    assert [record["policy_version"] for record in rounds] == [1, 2]
    assert not [check for record in records for check in record.get("checks", ()) if not check["ok"]]

    evaluations = sql(place, "SELECT rollout_id, name, score, explanation FROM evaluations")
    scores = {
        name: {row["rollout_id"]: row for row in evaluations if row["name"] == name} for name in (REWARD, CRITERION)
    }
    assert len(evaluations) == 2 * ROLLOUTS
    assert len(scores[REWARD]) == len(scores[CRITERION]) == ROLLOUTS
    for rollout, row in scores[REWARD].items():
        assert row["score"] == scores[CRITERION][rollout]["score"]
        assert row["explanation"] == (
            f"{CRITERION} 10: as the reference" if row["score"] else f"{CRITERION} 0: another"
        )
    answers = sql(place, "SELECT rollout_id, reward FROM rollouts")
    assert {row["rollout_id"]: row["reward"] for row in answers} == {
        rollout: row["score"] for rollout, row in scores[REWARD].items()
    }
    assert 0 < sum(row["reward"] for row in answers) < ROLLOUTS

"""The calculator agent that summarizes: its demonstrations are its requests, and half of their summaries are right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.plans import ROOT
from tests.support.agents.openai_server import OpenAIServer
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_schemas.agents.call_kinds import kind_of_request

FOLDER = ROOT / "evaluation" / "ablations"
PROGRAM = """
import itertools, json, sys
import summary_policy as policy
if len(sys.argv) > 1:
    policy.RIGHT_ORDER, policy.SUMMARIES = 1.0, {"right": 1.0}
problems = list(itertools.islice(policy.problems("train", 0), 400))
generator = policy.Random(0)
print(json.dumps([[one.text, one.answer, list(policy.conversations(one, generator))] for one in problems]))
"""


def demonstrated(*arguments: str) -> list[tuple[str, str, list[list[dict[str, str]]]]]:
    """Problem, answer and the conversations about it, of 400 problems."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=FOLDER, env={"PYTHONPATH": str(FOLDER)}, stdout=-1, check=True
    )
    made: list[tuple[str, str, list[list[dict[str, str]]]]] = json.loads(done.stdout)
    return made


@pytest.mark.ci
def test_a_model_that_summarizes_rightly_solves_every_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = demonstrated("right")[:6]
    answers: dict[str, str] = {}
    for _, _, conversations in problems:
        assert len(conversations) == 3, "two operations and the answer"
        for messages in conversations:
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    answers[json.dumps([said["content"] for said in messages[:number]])] = message["content"]
    kinds = []

    def answer(body: dict[str, Any]) -> str:
        kind = kind_of_request(body)
        kinds.append(kind and kind.kind)
        return answers[json.dumps([message["content"] for message in body["messages"]])]

    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"id": text, "input": text, "answer": right, "split": "train"} for text, right, _ in problems]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with OpenAIServer(answer, models=({"id": "policy", "max_model_len": 512},)) as server:
        result = run_rollouts(
            RunSettings(
                tasks,
                (f"{FOLDER / 'summarizing_agent.py'}:solve",),
                "run",
                n=1,
                judge=f"{ROOT / 'examples/calculator/judge.py'}:exact",
                policy_url=server.url,
                collector="http://127.0.0.1:9",
                deliver_timeout_s=1.0,
            )
        )
    assert (result.status, result.mean_reward) == ({"ok": 6}, 1.0)
    assert sorted(map(str, kinds)) == ["other"] * 18 + ["summary"] * 12


@pytest.mark.ci
def test_half_of_the_demonstrated_summaries_are_right() -> None:
    conversations = [messages for _, _, each in demonstrated() for messages in each if len(messages) == 5]
    first = [messages for messages in conversations if sum(map(messages[0]["content"].count, "+-*/")) > 1]
    kinds = {"as before": 0, "result alone": 0, "right": 0}
    for asked, _, found, _, summary in first:
        text = summary["content"]
        kind = {asked["content"]: "as before", found["content"]: "result alone"}.get(text, "right")
        kinds[kind] += 1
        assert kind != "right" or found["content"] in text
    shares = {kind: number / len(first) for kind, number in kinds.items()}
    assert shares == pytest.approx({"as before": 0.25, "result alone": 0.25, "right": 0.5}, abs=0.06)

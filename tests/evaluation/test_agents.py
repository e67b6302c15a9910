"""Each agent in its own environment, with the packages of its pins if it has any, on tasks and demonstrations made from the real sources.

A server plays the demonstrations: where an agent's request is the prompt of one, it gives the demonstrated answer.
So the test also shows that demonstrations have exactly the prompts that the agent sends.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.environments import install
from evaluation.plans import ROOT, TASKS, Plan, folder_of, pins_of
from evaluation.task_files import read_lines
from tests.evaluation.modules import load
from tests.support.agents.openai_server import OpenAIServer
from trainspan_rollouts import RunSettings, run_rollouts

SMALL_GAME = (
    "import sys, runpy; import tasks; tasks.TRAIN_GAMES, tasks.HELDOUT_GAMES, tasks.DEMONSTRATED_GAMES = 8, 4, 8; "
)
SMALL_GAME += (
    "from pathlib import Path; folder = Path(sys.argv[1]); tasks.ABLATION_GAMES = 2; "
    "tasks.write_tasks(folder, *tasks.write_games(folder / 'games')); "
    "games = [(kind[0], tasks.write_ablation_games(folder / 'games', *kind)) for kind in (tasks.SHORT, tasks.LONG)]; "
    "[tasks.write_lines(folder / f'{name}.jsonl', made) for name, made in games]"
)


def plain(message: dict[str, Any]) -> tuple[Any, ...]:
    """The parts of a message that a chat template renders."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], message.get("content") or "", json.dumps(calls)


def played(demonstrations: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Prompt → demonstrated answer, for each message of the assistant that is to be learned."""
    found = {}
    for one in demonstrations:
        messages = [*one["prompt"], *one["completion"]]
        for number in range(len(one["prompt"]), len(messages)):
            if messages[number]["role"] == "assistant":
                key = (*map(plain, messages[:number]), json.dumps(one.get("tools"), sort_keys=True))
                found[key] = messages[number]
    return found


INSTALLED = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1800)]


@pytest.mark.ci
@pytest.mark.parametrize("task", [pytest.param(task, marks=INSTALLED if pins_of(task) else ()) for task in TASKS])
def test_a_perfect_model_solves_the_demonstrated_tasks(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, python = tmp_path / "data", Path(sys.executable)
    if pins := pins_of(task):
        install(tmp_path / "environment", pins)
        python = tmp_path / "environment" / "bin" / "python"
    folder = folder_of(task)
    program = ["-c", SMALL_GAME] if task == "game" else [str(folder / "tasks.py")]
    environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    subprocess.run([python, *program, data], check=True, env=environ, timeout=900)
    if task == "game":
        for name, least_turns in (("short", 4), ("long", 8)):
            games = read_lines(data / f"{name}.jsonl")
            assert [one["split"] for one in games] == ["train", "train", "val", "val"]
            assert [one["input"] for one in games[:2]] == [one["input"] for one in games[2:]]
            for one in games:
                assert (one["input"]["goal"].count(", then "), one["meta"]["turns"] >= least_turns) == (3, True)
    check_agent(task, python, data, tmp_path, monkeypatch)


def check_agent(task: str, python: Path, data: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolls out demonstrated tasks with a server that plays the demonstrations; every task must be solved."""
    tasks, demonstrations = read_lines(data / "tasks.jsonl"), read_lines(data / "demonstrations.jsonl")
    shown = [one["prompt"][-1]["content"] for one in demonstrations]
    wanted = [one for one in tasks if one["split"] == "train" and any(_asks(one["input"], text) for text in shown)][:6]
    assert len(wanted) == 6
    known, unknown = played(demonstrations), []

    def answer(body: dict[str, Any]) -> str | dict[str, Any]:
        if body["messages"][0]["content"].startswith("Say yes"):
            return "yes"
        key = (*map(plain, body["messages"]), json.dumps(body.get("tools"), sort_keys=True))
        if key not in known:
            unknown.append(body)
            return "unknown"
        return known[key]

    monkeypatch.setenv("TRAINSPAN_HOME", str(place / "home"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    file = place / "wanted.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in wanted))
    (judge,) = load(task, "judge")
    name = {
        "shop": "exact",
        "calculator": "exact",
        "math": "exact",
        "sql": "exact",
        "retrieval": "dense",
        "game": "score",
        "terminal": "exact",
    }[task]
    assert hasattr(judge, name)
    rollouts = Plan(task, 0, "model").loaded().rollouts
    if rollouts.harness is not None:
        monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    with OpenAIServer(answer, models=({"id": "policy", "max_model_len": 8192},)) as server:
        result = run_rollouts(
            RunSettings(
                file,
                () if rollouts.harness else (f"{folder_of(task) / 'agent.py'}:solve",),
                "run",
                harness=rollouts.harness and str(ROOT / rollouts.harness),
                workspace=rollouts.workspace and str(data / rollouts.workspace),
                n=1,
                python=str(python),
                judge=f"{folder_of(task) / 'judge.py'}:{name}",
                policy_url=server.url,
                collector="http://127.0.0.1:9",
                deliver_timeout_s=1.0,
            )
        )
    assert unknown == []
    assert result.status == {"ok": 6}
    assert result.mean_reward == pytest.approx(1.0, abs=0.01)


def _asks(asked: Any, prompt: str) -> bool:
    """Whether the prompt of a demonstration is about a task."""
    text = asked if isinstance(asked, str) else asked.get("question") or f"goal: {asked['goal']}\n"
    return text in prompt

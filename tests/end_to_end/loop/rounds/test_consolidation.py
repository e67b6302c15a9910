"""A run ends with supervised training on its own successes: kept, put back, and killed in the middle."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT, Place, make_place, write_loop_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VAL_TASKS = 40
ENDS = [2, *range(3, 97)]
"""The end of a turn, and the tokens of the tiny model that are a printable character each."""


def prepare(tmp_path: Path) -> tuple[Place, list[str]]:
    """A folder, and the command of a loop of two rounds on a random model: by chance its answers end with the first token."""
    place = make_place(tmp_path / "home")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    make_tiny_model(inputs / "model")
    (inputs / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    tasks = [{"id": f"t{number}", "input": f"1 + {number}"} for number in range(4)]
    tasks += [{"id": f"val-{number}", "input": f"2 + {number}", "split": "val"} for number in range(VAL_TASKS)]
    (inputs / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = tmp_path / "trainspan.toml"
    write_loop_config(
        config,
        inputs,
        rollouts={"n": 8, "judge": ""},
        sft={"num_train_epochs": 40},
        loop={
            "target": "tests/end_to_end/loop/rounds/fickle_agent.py:solve_tersely",
            "rounds": 2,
            "tasks_per_round": 4,
            "eval_tasks": VAL_TASKS,
            "eval_every": 0,
            "consolidate": True,
        },
    )
    config.write_text(config.read_text().replace('judge = ""\n', ""))
    advanced = {"GRADIENT_ACCUMULATION_STEPS": "1", "SAVE_STEPS": "1", "EVAL_FRACTION": "0"}
    place.environ.update({f"TRAINSPAN_SFT__{name}": value for name, value in advanced.items()})
    return place, ["trainspan", "loop", "--config", str(config), "--resume", "--format", "json"]


def consolidated(place: Place) -> list[dict[str, Any]]:
    lines = [line for path in place.home.glob("runs/*/rounds.jsonl") for line in path.read_text().splitlines()]
    return [
        record for record in map(json.loads, lines) if record["kind"] == "eval" and record["name"] == "consolidated"
    ]


def kill_once(command: list[str], environ: dict[str, str], is_there: Callable[[], bool]) -> None:
    """Runs the loop until the condition holds, and kills it then."""
    loop = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not is_there():
        assert loop.poll() is None, loop.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    loop.kill()
    loop.wait()


def test_a_loop_killed_while_it_consolidates_comes_to_the_same_end(tmp_path: Path) -> None:
    place, command = prepare(tmp_path)
    home = place.home
    kill_once(command, place.environ, lambda: any(home.glob("runs/*/consolidated.unfinished/checkpoint-*")))
    time.sleep(3)
    kill_once(
        command,
        place.environ,
        lambda: any('"version"' in path.read_text() for path in home.glob("runs/*/consolidation.json")),
    )
    time.sleep(3)
    done = subprocess.run(
        command, cwd=ROOT, env=place.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (record,) = consolidated(place)
    made, (run,) = record["consolidation"], (home / "runs").iterdir()
    assert (made["kept"], made["version"], record["policy_version"]) == (True, 3, 3)
    assert record["mean"] > made["before"]["mean"] + 0.2, "it has learned to end with the first token"
    assert [check["name"] for check in record["checks"] if not check["ok"]] == []
    assert (run / "checkpoints" / "latest").read_text().strip() == "policy-000003"
    assert json.loads((run / "checkpoints/policy-000003/trainspan.json").read_text())["parent"] == "policy-000002"
    steps = [json.loads(line)["step"] for line in (run / "consolidated/sft/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, made["steps"] + 1)), "no step is missing or made twice"
    assert made["trained_tokens"] == 40 * made["answers"]
    assert json.loads((run / "run.json").read_text())["best"]["policy_version"] == 3
    assert "consolidation" in (run / "report.html").read_text()


def test_a_consolidated_version_that_is_worse_is_taken_out_of_service(tmp_path: Path) -> None:
    place, command = prepare(tmp_path)
    environ = {**place.environ, "FICKLE_INVERSE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (record,), (run,) = consolidated(place), (place.home / "runs").iterdir()
    made = record["consolidation"]
    assert (made["kept"], record["mean"] < made["before"]["mean"]) == (False, True)
    assert (run / "checkpoints" / "latest").read_text().strip() == "policy-000002"
    assert "version 2 goes back in service in place of version 3" in done.stderr
    assert json.loads((run / "run.json").read_text()).get("best", {}).get("policy_version") != 3

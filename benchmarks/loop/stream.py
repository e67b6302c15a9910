"""Rollouts per second of `trainspan loop` in rounds and as a stream, if one rollout of 20 takes 20 times as long.

The agents wait, so that the policy server (a tiny model) and the trainer are not the limit. The ideal is that all places for
rollouts are always taken: `concurrency` by the mean duration of a rollout, as the agents measured it. The first round and the
last, which end the stream, are not counted.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import make_place, write_loop_config

__all__ = ["measure"]

_ROUNDS = 7
_CONCURRENCY = 32
_MODES = {
    "rounds": {"mode": "rounds"},
    "rounds, overlap 1": {"mode": "rounds", "overlap": 1},
    "stream": {"mode": "stream"},
}
_ROOT = Path(__file__).parents[2]


def measure() -> dict[str, Any]:
    """Rollouts per second and their share of the ideal, by mode."""
    figures: dict[str, Any] = {}
    for name, chosen in _MODES.items():
        rate, ideal, staleness = _loop(chosen)
        figures[f"rollouts_per_s ({name})"] = round(rate, 2)
        figures[f"share_of_ideal ({name})"] = round(rate / ideal, 3)
        figures[f"staleness_max ({name})"] = staleness
    return figures


def _loop(chosen: dict[str, Any]) -> tuple[float, float, int]:
    """Returns rollouts per second, the ideal, and the greatest staleness of a call."""
    with tempfile.TemporaryDirectory() as folder:
        place, inputs, log = make_place(Path(folder) / "home"), Path(folder), Path(folder) / "durations"
        make_tiny_model(inputs / "model")
        tasks = [{"id": f"t{number}", "input": f"1 + {number}"} for number in range(200)]
        (inputs / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        config = inputs / "trainspan.toml"
        write_loop_config(
            config,
            inputs,
            rollouts={"n": 8, "judge": "", "concurrency": _CONCURRENCY},
            train={"rollouts_per_step": 64},
            loop={
                "target": "benchmarks/support/tailed_agent.py:solve",
                "tasks_per_round": 16,
                "eval_tasks": 0,
                "eval_every": 0,
                "rounds": _ROUNDS,
                **chosen,
            },
        )
        config.write_text(config.read_text().replace('judge = ""\n', ""))
        environ = {**os.environ, **place.environ, "TAIL_LOG": str(log)}
        command = [sys.executable, "-m", "trainspan_cli", "loop", "--config", str(config)]
        subprocess.run(command, cwd=_ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
        (file,) = place.home.glob("runs/*/rounds.jsonl")
        counted = [json.loads(line) for line in file.read_text().splitlines()][1:-1]
        durations = [float(line) for line in log.read_text().splitlines()]
        (metrics,) = place.home.glob("runs/*/checkpoints/metrics.jsonl")
        staleness = max(json.loads(line)["staleness_max"] for line in metrics.read_text().splitlines())
    rate = sum(record["rollout"]["total"] for record in counted) / sum(record["seconds"]["total"] for record in counted)
    return rate, _CONCURRENCY / statistics.mean(durations), staleness

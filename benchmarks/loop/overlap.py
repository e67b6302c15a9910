"""Rollouts per hour of `trainspan loop` with `[loop] overlap` 0 and 1, on the demo's agent, with and without waiting.

SmolLM2 (`TRAINSPAN_BENCH_MODEL=FOLDER`) in rounds of 16 tasks × 8 rollouts. The agent either computes all the time, or waits
for 20 s in each rollout as for a slow tool. Server and trainer share the machine's cores. The first round and the last are
not counted: in one nothing is trained yet, in the other nothing is sampled. Busy cores: CPU seconds of all processes per second.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports

__all__ = ["measure"]

_ROUNDS = 5
_WAITS_S = (0, 20)
_ROOT = Path(__file__).parents[2]


def measure() -> dict[str, Any]:
    """Rollouts per hour, and their ratio, by the agents' waiting time."""
    figures: dict[str, Any] = {}
    for wait_s in _WAITS_S:
        rates = []
        for overlap in (0, 1):
            rate, cores, reward = _loop(overlap, wait_s)
            rates.append(rate)
            name = f"wait {wait_s} s, overlap {overlap}"
            figures[f"rollouts_per_hour ({name})"] = round(rate)
            figures[f"busy_cores ({name})"] = round(cores, 2)
            figures[f"last_reward ({name})"] = round(reward, 3)
        figures[f"overlapped_over_alternating (wait {wait_s} s)"] = round(rates[1] / rates[0], 2)
    return figures


def _loop(overlap: int, wait_s: float) -> tuple[float, float, float]:
    """Returns rollouts per hour, busy cores, and the mean reward of the last round."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        subprocess.run([sys.executable, _ROOT / "examples/shop/tasks.py", folder], check=True)
        otlp, flight, policy = free_ports(3)
        chosen = {
            "COLLECTOR__GRPC": f"127.0.0.1:{otlp}",
            "COLLECTOR__HTTP": "127.0.0.1:0",
            "COLLECTOR__FLIGHT": f"127.0.0.1:{flight}",
            "SERVING__PORT": str(policy),
            "TRAIN__MODEL": os.environ["TRAINSPAN_BENCH_MODEL"],
            "ROLLOUTS__TASKS": str(Path(folder) / "tasks.jsonl"),
            "LOOP__TARGET": "benchmarks/support/waiting_agent.py:solve",
            "LOOP__OVERLAP": str(overlap),
            "LOOP__EVAL_TASKS": "0",
            "LOOP__EVAL_EVERY": "0",
        }
        environ = {**os.environ, **{f"TRAINSPAN_{name}": value for name, value in chosen.items()}}
        environ |= {"TRAINSPAN_HOME": str(home), "OVERLAP_WAIT_S": str(wait_s)}
        command = [sys.executable, "-m", "trainspan_cli", "loop", "--config", "examples/shop/trainspan.toml"]
        began, cpu_s = time.monotonic(), _children_cpu_s()
        subprocess.run(
            [*command, "--rounds", str(_ROUNDS)], cwd=_ROOT, env=environ, check=True, stdout=subprocess.DEVNULL
        )
        cores = (_children_cpu_s() - cpu_s) / (time.monotonic() - began)
        (file,) = home.glob("runs/*/rounds.jsonl")
        rounds = [json.loads(line) for line in file.read_text().splitlines()]
    counted = rounds[1:-1]
    rollouts = sum(record["rollout"]["total"] for record in counted)
    hours = sum(record["seconds"]["total"] for record in counted) / 3600
    return rollouts / hours, cores, rounds[-1]["rollout"]["mean_reward"]


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

"""What our side costs an agent: CPU and wall time per model call, and start-up time.

The same plain openai agent calls a local server that answers at once, in turns: plain, under `opentelemetry-instrument`
without us, and with us; spans go to a real OTLP receiver. The difference of the latter two is ours. Start-up is a program
that does nothing.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.openai_server import OpenAIServer
from tests.support.otlp_recorder import OtlpRecorder
from tests.support.programs import environment

__all__ = ["measure"]

_ROUNDS = 7
_CALLS = 200
_AGENT = f"""
import json, time
from openai import OpenAI

client = OpenAI()
messages = [{{"role": "system", "content": "You are a clerk. " * 40}}, {{"role": "user", "content": "hello " * 200}}]
tools = [{{"type": "function", "function": {{"name": "look", "parameters": {{"type": "object", "properties": {{}}}}}}}}]


def ask():
    client.chat.completions.create(model="policy", messages=messages, tools=tools)


for _ in range(20):
    ask()
cpu, wall = time.thread_time(), time.perf_counter()
process = time.process_time()
for _ in range({_CALLS}):
    ask()
print(json.dumps([
    1000 * (time.thread_time() - cpu) / {_CALLS},
    1000 * (time.process_time() - process) / {_CALLS},
    1000 * (time.perf_counter() - wall) / {_CALLS},
]))
"""
_EMPTY = "import resource, json; print(json.dumps(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])))"


def measure() -> dict[str, Any]:
    """Medians over rounds, with the spread; milliseconds per call, seconds of CPU for the start."""
    variants: dict[str, tuple[list[str], dict[str, str]]] = {
        "plain": ([], {}),
        "instrumented without us": (["opentelemetry-instrument"], {"TRAINSPAN_DISABLED": "1"}),
        "instrumented with us": (["opentelemetry-instrument"], {}),
    }
    figures: dict[str, list[list[float]]] = {name: [] for name in variants}
    starts: dict[str, list[float]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as folder, OpenAIServer() as policy, OtlpRecorder() as recorder:
        agent, empty = Path(folder) / "agent.py", Path(folder) / "empty.py"
        agent.write_text(_AGENT)
        empty.write_text(_EMPTY)
        wired = {
            "OPENAI_BASE_URL": policy.url,
            "OPENAI_API_KEY": "key",
            "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_METRICS_EXPORTER": "none",
        }
        for _ in range(_ROUNDS):
            for name, (prefix, extra) in variants.items():
                figures[name].append(_run(prefix, agent, {**wired, **extra}))
                starts[name].append(_run(prefix, empty, {**wired, **extra}))
            policy.requests.clear()
            recorder.spans.clear()
    measured: dict[str, Any] = {}
    for place, what in enumerate(("agent's thread CPU ms", "process CPU ms", "wall ms")):
        for name in variants:
            measured[f"{what} per call ({name})"] = _spread([round_[place] for round_ in figures[name]], 3)
        added = _paired([[round_[place] for round_ in figures[name]] for name in list(variants)[1:]])
        measured[f"{what} per call added by us (paired)"] = _spread(added, 3)
    for name in variants:
        measured[f"start-up CPU s ({name})"] = _spread(starts[name], 3)
    measured["start-up CPU s added by us (paired)"] = _spread(_paired([starts[name] for name in list(variants)[1:]]), 3)
    return measured


def _paired(columns: list[list[float]]) -> list[float]:
    return [with_us - without for without, with_us in zip(*columns, strict=True)]


def _run(prefix: list[str], program: Path, extra: dict[str, str]) -> Any:
    command = [*prefix, sys.executable, str(program)]
    done = subprocess.run(
        command, env=environment({**extra, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}), capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))

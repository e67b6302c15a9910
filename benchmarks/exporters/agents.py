"""The overhead of trainspan in an agent: CPU and wall time per model call.

The same plain openai agent calls a local server that answers at once: plain, under `opentelemetry-instrument` without
trainspan, and with it; spans go to a real OTLP receiver. The three processes run side by side and take many short turns.
The difference between the last two is trainspan's cost, including its export settings: it sends after 0.2 s, the SDK alone
after 5 s, so CPU time of the whole process is given as a mean over the turns. A lone call is exported by itself.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.pairs import mean, rotated, summary
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment
from tests.support.otlp.recorder import OtlpRecorder

__all__ = ["measure"]

_TURNS = 60
_CALLS = 40
_LONE_TURNS = 50
_AGENT = """
import json, sys, time
from openai import OpenAI

client = OpenAI()
messages = [{"role": "system", "content": "You are a clerk. " * 40}, {"role": "user", "content": "hello " * 200}]
tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

spent = time.process_time()
for line in sys.stdin:
    thread, wall = time.thread_time(), time.perf_counter()
    for _ in range(int(line)):
        client.chat.completions.create(model="policy", messages=messages, tools=tools)
    thread, wall = time.thread_time() - thread, time.perf_counter() - wall
    time.sleep(0.3)  # trainspan's exports count to this turn; the SDK's exports between turns to the next
    spent, before = time.process_time(), spent
    print(json.dumps([1000 * seconds / int(line) for seconds in (thread, spent - before, wall)]), flush=True)
"""
_CLOCKS = ("thread", "process", "wall")
_WITHOUT, _WITH = "instrumented without us", "instrumented with us"
_VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "plain": ([], {}),
    _WITHOUT: (["opentelemetry-instrument"], {"TRAINSPAN_DISABLED": "1"}),
    _WITH: (["opentelemetry-instrument"], {}),
}


def measure() -> dict[str, Any]:
    """Milliseconds per call."""
    with tempfile.TemporaryDirectory() as folder, OpenAIServer() as policy, OtlpRecorder() as recorder:
        wired = {
            "OPENAI_BASE_URL": policy.url,
            "OPENAI_API_KEY": "key",
            "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_METRICS_EXPORTER": "none",
        }
        return _calls(Path(folder), wired)


def _calls(folder: Path, wired: dict[str, str]) -> dict[str, Any]:
    program = folder / "agent.py"
    program.write_text(_AGENT)
    with contextlib.ExitStack() as stack:
        agents = {name: stack.enter_context(_started(name, program, wired)) for name in _VARIANTS}
        many = _turns(agents, _CALLS, _TURNS)
        lone = _turns(agents, 1, _LONE_TURNS)
    measured: dict[str, Any] = {}
    for what, figures, reduce in (
        ("agent's thread CPU ms per call", many["thread"], summary),
        ("wall ms per call", many["wall"], summary),
        ("process CPU ms per call", many["process"], mean),
        ("process CPU ms per lone call", lone["process"], mean),
    ):
        measured |= {f"{what} ({name})": reduce(column, 3) for name, column in figures.items()}
        measured[f"{what} added by us"] = reduce(_added(figures), 3)
    return measured


def _turns(agents: "dict[str, subprocess.Popen[str]]", calls: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Clock → variant → milliseconds per call of each round."""
    figures: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in agents} for clock in _CLOCKS}
    for agent in agents.values():  # warms up
        _turn(agent, calls)
    for names in rotated(list(agents), rounds):
        for name in names:
            for clock, value in zip(_CLOCKS, _turn(agents[name], calls), strict=True):
                figures[clock][name].append(value)
    return figures


def _added(columns: dict[str, list[float]]) -> list[float]:
    return [us - them for us, them in zip(columns[_WITH], columns[_WITHOUT], strict=True)]


@contextlib.contextmanager
def _started(name: str, program: Path, wired: dict[str, str]) -> "Iterator[subprocess.Popen[str]]":
    prefix, extra = _VARIANTS[name]
    environ = environment({**wired, **extra, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    with subprocess.Popen(
        [*prefix, sys.executable, str(program)], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def _turn(agent: "subprocess.Popen[str]", calls: int) -> list[float]:
    assert agent.stdin is not None
    assert agent.stdout is not None
    print(calls, file=agent.stdin, flush=True)
    figures: list[float] = json.loads(agent.stdout.readline())
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))

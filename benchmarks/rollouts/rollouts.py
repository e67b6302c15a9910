"""The overhead of running a rollout, without the agent itself.

In-process: 10,000 rollouts of a function that does nothing, as CPU time of runner and worker together per rollout, less
that of a run of one rollout (their start). Process: CPU time from an agent's start to its end, stage by stage, each
relative to the previous one; the agent is `pass`.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.agents.programs import BIN, environment
from tests.support.otlp.sink import otlp_sink

__all__ = ["measure"]

_ROLLOUTS = 10_000
_REPEATS = 7
_AGENT = "async def solve(task):\n    return 1.0\n"
_SYNC_AGENT = "def solve(task):\n    return 1.0\n"


def measure() -> dict[str, Any]:
    """Milliseconds of CPU time; medians with the spread if a figure was measured several times."""
    with tempfile.TemporaryDirectory() as folder, otlp_sink() as (_, collector):
        root = Path(folder)
        return {**_in_process(root, collector), **_processes(root, collector)}


def _in_process(root: Path, collector: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, source in (("asynchronous", _AGENT), ("synchronous", _SYNC_AGENT)):
        (root / "agent.py").write_text(source)
        alone = _rollouts_cpu_s(root, collector, 1)
        many = _rollouts_cpu_s(root, collector, _ROLLOUTS)
        figures[f"in_process_cpu_ms_per_rollout ({name})"] = round(1000 * (many - alone) / (_ROLLOUTS - 1), 3)
        figures[f"in_process_start_cpu_ms ({name})"] = round(1000 * alone)
    return figures


def _rollouts_cpu_s(root: Path, collector: str, count: int) -> float:
    tasks = root / f"tasks-{count}.jsonl"
    tasks.write_text("".join(f'{{"id": {number}, "input": "x"}}\n' for number in range(count)))
    command = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", str(tasks), "--n", "1", "--format", "json"]
    environ = environment({"TRAINSPAN_COLLECTOR__ENDPOINTS": collector, "TRAINSPAN_HOME": str(root / "home")})
    seconds, output = _cpu_s([*command, "agent.py:solve"], environ, root)
    result = json.loads(output.splitlines()[-1])
    if (result["status"], result["unacknowledged"]) != ({"ok": count}, 0):
        raise RuntimeError(f"the rollouts failed: {result}")
    return seconds


def _processes(root: Path, collector: str) -> dict[str, Any]:
    """The cost of each stage over an earlier one.

    Without trainspan, all installed instrumentations are loaded at the start; its hook loads each with its library.
    """
    python, instrument = str(BIN / "python"), str(BIN / "opentelemetry-instrument")
    (root / "pass.py").write_text("pass\n")
    off = {"TRAINSPAN_DISABLED": "1", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "*"}
    nothing = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "LOGS", "METRICS")}
    export = {"OTEL_METRICS_EXPORTER": "none", "OTEL_TRACES_EXPORTER": "otlp", "OTEL_LOGS_EXPORTER": "otlp"}
    export |= {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": collector}
    alone = [python, "pass.py"]
    instrumented = [instrument, *alone]
    stages: list[tuple[str, Sequence[str], Mapping[str, str]]] = [
        ("python", alone, {}),
        ("opentelemetry-instrument and SDK", instrumented, {**off, **nothing}),
        ("OTLP/gRPC exporter", instrumented, {**off, **export}),
        ("instrumentations, all at once (without trainspan)", instrumented, {**export, "TRAINSPAN_DISABLED": "1"}),
        ("trainspan hook and process span, instrumentations when needed", instrumented, export),
    ]
    figures: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in stages}
    for _ in range(_REPEATS):
        for name, command, extra in stages:
            seconds[name].append(_cpu_s(command, environment(extra), root)[0])
    medians = [statistics.median(seconds[name]) for name, _, _ in stages]
    exporter = medians[2]
    for (name, _, _), median, before in zip(stages, medians, [0.0, *medians[:2], exporter, exporter], strict=True):
        figures[f"process_start_cpu_ms: {name}"] = round(1000 * (median - before), 1)
    over = [1000 * (last - first) for last, first in zip(*(seconds[stages[n][0]] for n in (-1, 0)), strict=True)]
    imports = [_cpu_s([python, "-c", "import openai"], environment({}), root)[0] for _ in range(_REPEATS)]
    own = 1000 * (statistics.median(imports) - statistics.median(seconds["python"]))
    figures["process_start_cpu_ms: import openai, for comparison"] = round(own, 1)
    low, high = min(over), max(over)
    figures["process_start_cpu_ms: all over bare python"] = f"{statistics.median(over):.0f} ({low:.0f} to {high:.0f})"
    return figures


def _cpu_s(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> tuple[float, str]:
    """User and system time of a program and its children, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, env={**environ, "PYTHONPATH": os.fspath(folder)}, cwd=folder, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout

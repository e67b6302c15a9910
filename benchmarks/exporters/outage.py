"""What tracing costs programs of many short processes if no collector answers: wall seconds, and their ratio to the bare run.

Each program starts processes or threads in one way. It runs bare, and under `opentelemetry-instrument` with a collector,
without one (connections are refused), and with one that accepts connections and never answers. The time is the program's
own, from its first line to its last, and that of the whole process.
"""

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support.pairs import rotated, summary
from tests.support.agents.programs import BIN, environment
from tests.support.otlp.recorder import OtlpRecorder

__all__ = ["measure"]

_ROUNDS = 5
_POOLS = """
import multiprocessing, time
def square(x):
    return x * x
if __name__ == "__main__":
    began_s = time.monotonic()
    for _ in range({count}):
        with multiprocessing.get_context("{method}").Pool(2) as pool:
            pool.map(square, range(4))
    print(time.monotonic() - began_s)
"""
_PROGRAMS = {
    "20 pools, fork": _POOLS.format(method="fork", count=20),
    "5 pools, spawn": _POOLS.format(method="spawn", count=5),
    "10 subprocesses": """
import subprocess, sys, time
began_s = time.monotonic()
for _ in range(10):
    subprocess.run([sys.executable, "-c", "pass"], check=True)
print(time.monotonic() - began_s)
""",
    "5 execs": """
import os, sys, time
began_s = float(os.environ.setdefault("BEGAN", str(time.monotonic())))
left = int(os.environ.get("LEFT", "5"))
if left:
    os.environ["LEFT"] = str(left - 1)
    os.execv(sys.executable, [sys.executable, __file__])
print(time.monotonic() - began_s)
""",
    "200 threads": """
import threading, time
began_s = time.monotonic()
for _ in range(200):
    thread = threading.Thread(target=time.sleep, args=(0.002,))
    thread.start()
    thread.join()
print(time.monotonic() - began_s)
""",
}


def measure() -> dict[str, Any]:
    """Wall seconds per program and situation."""
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        OtlpRecorder() as recorder,
        socket.create_server(("127.0.0.1", 0), backlog=1024) as silent,
    ):
        situations = {
            "bare": None,
            "collector": recorder.endpoint,
            "refused": "http://127.0.0.1:9",
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        program = Path(folder) / "agent.py"
        for name, source in _PROGRAMS.items():
            program.write_text(source)
            own: dict[str, list[float]] = {situation: [] for situation in situations}
            whole: dict[str, list[float]] = {situation: [] for situation in situations}
            for turn in rotated(list(situations), _ROUNDS):
                for situation in turn:
                    of_program, of_process = _run(program, situations[situation])
                    own[situation].append(of_program)
                    whole[situation].append(of_process)
            for situation in situations:
                ratios = [one / bare for one, bare in zip(own[situation], own["bare"], strict=True)]
                figures[f"{name}, {situation}: s"] = summary(own[situation], 2)
                figures[f"{name}, {situation}: s with start and end"] = summary(whole[situation], 2)
                figures[f"{name}, {situation}: ratio to bare"] = summary(ratios, 1)
    return figures


def _run(program: Path, endpoint: str | None) -> tuple[float, float]:
    extra = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "openai", "TMPDIR": str(program.parent)}
    if endpoint:
        extra["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    command = [*(["opentelemetry-instrument"] if endpoint else []), str(BIN / "python"), str(program)]
    began_s = time.perf_counter()
    done = subprocess.run(
        command, env=environment(extra), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    assert os.listdir(program.parent) == [program.name], "no file of an outage is left"
    return float(done.stdout), time.perf_counter() - began_s

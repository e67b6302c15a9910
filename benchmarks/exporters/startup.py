"""What tracing adds to a program from start to exit: CPU and wall seconds of ordinary agents that make one call.

Each program runs bare, under `opentelemetry-instrument` with trainspan disabled, with it, and with the instrumentor of the extra
`messages` too, in the environment of the agents (`.venv-agents`) without those of web frameworks. A local server answers at
once; spans go to a real OTLP receiver. The variants of a program run in turn, so that each run has neighbors to compare with.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.support.pairs import rotated, summary
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment
from tests.support.otlp.recorder import OtlpRecorder
from tests.support.places import ROOT

__all__ = ["measure"]

_ROUNDS = 12
_COMMANDS = ROOT / ".venv-agents" / "bin"
_PROGRAMS = {
    "nothing": "",
    "requests": """
import os, requests
body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
requests.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body).raise_for_status()
""",
    "openai": """
from openai import OpenAI
OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
""",
    "LangGraph": """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
agent = create_agent(ChatOpenAI(model="policy"), [], system_prompt="You are a clerk.", name="clerk")
agent.invoke({"messages": [{"role": "user", "content": "hello"}]})
""",
}
_BARE, _DISABLED, _TRACED, _MESSAGES = "bare", "trainspan disabled", "traced", "traced with messages"
_VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    _BARE: ([], {}),
    _DISABLED: (["opentelemetry-instrument"], {"TRAINSPAN_DISABLED": "1"}),
    _TRACED: (["opentelemetry-instrument"], {}),
    _MESSAGES: (["opentelemetry-instrument"], {"PYTHONPATH": str(ROOT / ".venv-agents" / "messages")}),
}


def measure() -> dict[str, Any]:
    """Seconds of each program, and what tracing adds to the bare run."""
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, OpenAIServer() as policy, OtlpRecorder() as recorder:
        wired = {
            "OPENAI_BASE_URL": policy.url,
            "OPENAI_API_KEY": "key",
            "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "aiohttp-server,django,fastapi,flask,starlette",
            "TRAINSPAN_HOME": folder,
        }
        for name, source in _PROGRAMS.items():
            program = Path(folder) / "agent.py"
            program.write_text(source)
            measured |= _compare(name, program, wired)
    return measured


def _compare(name: str, program: Path, wired: dict[str, str]) -> dict[str, Any]:
    spent: dict[str, list[tuple[float, float]]] = {variant: [] for variant in _VARIANTS}
    for variant in _VARIANTS:  # fills the caches of bytecode and files
        _run(variant, program, wired)
    for variants in rotated(list(_VARIANTS), _ROUNDS):
        for variant in variants:
            spent[variant].append(_run(variant, program, wired))
    figures: dict[str, Any] = {}
    for place, clock in enumerate(("CPU", "wall")):
        column = {variant: [one[place] for one in runs] for variant, runs in spent.items()}
        figures |= {f"{name}: {clock} s, {variant}": summary(values, 2) for variant, values in column.items()}
        for variant in (_TRACED, _MESSAGES):
            added = [traced - bare for traced, bare in zip(column[variant], column[_BARE], strict=True)]
            figures[f"{name}: {clock} s added when {variant}"] = summary(added, 2)
    return figures


def _run(variant: str, program: Path, wired: dict[str, str]) -> tuple[float, float]:
    """CPU and wall seconds of a run, with the start of `opentelemetry-instrument`; the program must succeed in silence."""
    prefix, extra = _VARIANTS[variant]
    environ = environment({**wired, **extra})
    environ["PATH"] = f"{_COMMANDS}{os.pathsep}{environ['PATH']}"
    began_s = time.perf_counter()
    with subprocess.Popen(
        [*prefix, "python", str(program)], env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or said:
        raise RuntimeError(f"{variant} run of {program.read_text()!r} ended with {process.returncode}: {said.decode()}")
    return usage.ru_utime + usage.ru_stime, wall_s

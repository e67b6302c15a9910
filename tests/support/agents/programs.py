"""Runs small agent programs the way users do: `opentelemetry-instrument python agent.py`."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BIN = Path(os.environ.get("TRAINSPAN_TEST_BIN") or Path(sys.executable).parent)
"""The `bin` folder of the environment for programs; `tests/end_to_end/agents/test_releases.py` chooses it."""
WITHOUT_OPENAI = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "openai"}
"""For programs that need no spans of openai's client, whose instrumentor takes half a second of CPU to load."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The outcome of a program."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without telemetry and policy settings, plus `extra`."""
    prefixes = ("OTEL_", "OPENAI_", "TRAINSPAN_", "TRACE", "BAGGAGE", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{kept['PATH']}", **extra}


def write(folder: Path, source: str, name: str = "agent.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


def run(path: Path, extra: Mapping[str, str], *, instrument: bool = True, timeout_s: float = 60) -> Ran:
    """Runs the program in its own folder."""
    prefix = ["opentelemetry-instrument"] if instrument else []
    return execute([*prefix, "python", str(path)], path.parent, extra, timeout_s=timeout_s)


def execute(command: list[str], folder: Path, extra: Mapping[str, str], *, timeout_s: float = 60) -> Ran:
    """Runs a command in a folder."""
    start_s = time.monotonic()
    done = subprocess.run(
        command,
        env=environment(extra),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - start_s)

"""Starts a web agent under `opentelemetry-instrument` in the agents' environment."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.agents.programs import environment
from tests.support.places import ROOT
from tests.support.ports import free_ports

AGENTS = ROOT / ".venv-agents"


@dataclass(frozen=True, slots=True)
class WebAgent:
    """A running server."""

    url: str

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> int:
        """Returns the status of the response."""
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, headers=dict(headers or {})), timeout=60
            ) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@contextlib.contextmanager
def web_agent(folder: Path, command: list[str], extra: Mapping[str, str]) -> Iterator[WebAgent]:
    """Runs `command`, with `{port}` filled in, in `folder`; ends it by SIGTERM, so that its spans have been sent.

    The instrumentation of openai, from the extra `messages`, records each call.
    """
    (port,) = free_ports(1)
    python_path = os.pathsep.join(filter(None, (str(AGENTS / "messages"), extra.get("PYTHONPATH"))))
    path = f"{AGENTS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["opentelemetry-instrument", *(word.format(port=port) for word in command)],
        env={**environment(extra), "PATH": path, "PYTHONPATH": python_path},
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    agent = WebAgent(f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(agent, process)
        yield agent
    finally:
        process.terminate()
        try:
            _, stderr = process.communicate(timeout=20)
            sys.stderr.write(stderr)  # shown if the test fails
        except subprocess.TimeoutExpired:
            _kill(process)


def _wait_until_ready(agent: WebAgent, process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError):
            agent.get("/idle")
            return
        time.sleep(0.05)
    raise AssertionError(f"the web agent did not come up: {_kill(process)[-2000:]}")


def _kill(process: "subprocess.Popen[str]") -> str:
    """Ends the process and its workers; returns its last output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1]

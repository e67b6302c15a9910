"""A recording policy server and collector, and runs of small agents between them."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_schemas.command_events import RunResult

Run = Callable[..., RunResult]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps the state of runs in the test's own folder."""
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Forgets the judges of earlier tests, which have the same module names."""
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture
def policy() -> Iterator[OpenAIServer]:
    with OpenAIServer(models=({"id": "policy", "max_model_len": 4096},)) as server:
        yield server


@pytest.fixture
def recorder() -> Iterator[OtlpRecorder]:
    with OtlpRecorder() as recorder:
        yield recorder


def write_tasks(folder: Path, *tasks: dict[str, Any]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


@pytest.fixture
def run(tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(source, tasks, target, **settings)` writes `agent.py` and runs the rollouts in its folder with n = 1."""
    monkeypatch.chdir(tmp_path)
    for name in ("TRACEPARENT", "BAGGAGE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", environment({})["PATH"])
    for name, value in WITHOUT_OPENAI.items():
        monkeypatch.setenv(name, value)

    def run_agent(source: str, tasks: list[dict[str, Any]], *target: str, **settings: Any) -> RunResult:
        write(tmp_path, source)
        defaults = {
            "run_id": "run",
            "n": 1,
            "timeout_s": 60.0,
            "policy_url": policy.url,
            "collector": recorder.endpoint,
        }
        return run_rollouts(RunSettings(write_tasks(tmp_path, *tasks), target, **{**defaults, **settings}))

    return run_agent

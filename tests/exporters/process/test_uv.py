"""Agents started by a real `uv run`, before or behind `opentelemetry-instrument`, in a project with its own `.venv`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.matrix.environments import install_uv
from tests.rollouts.conftest import write_tasks
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import BIN, environment, execute, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_schemas.telemetry import keys

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(900)]

AGENT = """
    import sys
    import openai

    client = openai.OpenAI()
    for text in ("one", "two"):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
    print("asked")
    print("a line of its own", file=sys.stderr)
    if "fail" in sys.argv:
        raise ValueError("no answer")
    sys.exit(3 if "exit" in sys.argv else 0)
"""
PROJECT = '[project]\nname = "own-agent"\nversion = "1"\nrequires-python = ">=3.11"\n'
CALLS = 2
PATIENCE_S = 200
UV = ("uv", "run", "--offline", "--no-sync")


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_uv(tmp_path_factory.mktemp("uv")).parent


@pytest.fixture
def project(tmp_path: Path, uv: Path, wired: dict[str, str]) -> Iterator[tuple[Path, dict[str, str]]]:
    """A uv project whose environment is this one, and the variables to run it."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / ".venv").symlink_to(BIN.parent)
    write(tmp_path, AGENT)
    return tmp_path, wired | {"PATH": f"{BIN}:{uv}:{environment({})['PATH']}"}


@pytest.mark.parametrize("ending", ["", "exit", "fail"])
@pytest.mark.parametrize(
    "command",
    [
        (*UV, "opentelemetry-instrument", "python", "agent.py"),
        ("opentelemetry-instrument", *UV, "agent.py"),
        ("opentelemetry-instrument", *UV, "python", "agent.py"),
    ],
    ids=["uv outside", "uv inside", "uv inside, python"],
)
def test_uv_run_is_one_rollout_and_ends_as_without_tracing(
    project: tuple[Path, dict[str, str]], recorder: OtlpRecorder, command: tuple[str, ...], ending: str
) -> None:
    folder, variables = project
    words = [ending] if ending else []
    without = [word for word in command if word != "opentelemetry-instrument"]
    bare = execute([*without, *words], folder, variables, timeout_s=PATIENCE_S)
    assert recorder.spans == []
    traced = execute([*command, *words], folder, variables, timeout_s=PATIENCE_S)
    assert bare.code == {"": 0, "exit": 3, "fail": 1}[ending]
    assert (traced.code, traced.stdout, traced.stderr) == (bare.code, bare.stdout, bare.stderr)
    rollout = recorder.one(keys.ROLLOUT_SPAN_NAME)
    assert rollout.attributes[keys.ROLLOUT_STATUS] == ("agent_error" if ending else "ok")
    assert rollout.attributes[keys.ROLLOUT_CALLS] == CALLS


def test_the_runner_starts_agents_by_uv_run(
    project: tuple[Path, dict[str, str]],
    policy: OpenAIServer,
    recorder: OtlpRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, variables = project
    monkeypatch.chdir(folder)
    for name in ("TRACEPARENT", "BAGGAGE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", variables["PATH"])
    monkeypatch.setenv("TRAINSPAN_HOME", str(folder / "home"))
    tasks = write_tasks(folder, {"id": "t1", "input": ""}, {"id": "t2", "input": "exit"})
    command = (*UV, "opentelemetry-instrument", "python", "agent.py", "{input}")
    result = run_rollouts(
        RunSettings(
            tasks, command, run_id="run", n=1, timeout_s=PATIENCE_S, policy_url=policy.url, collector=recorder.endpoint
        )
    )
    assert result.status == {"ok": 1, "agent_error": 1}
    rollouts = {span.trace_id: span for span in recorder.named(keys.ROLLOUT_SPAN_NAME)}
    assert {span.attributes[keys.ROLLOUT_CALLS] for span in rollouts.values()} == {CALLS}
    assert {span.trace_id for span in recorder.named("trainspan.process")} == rollouts.keys()
    assert len(rollouts) == 2

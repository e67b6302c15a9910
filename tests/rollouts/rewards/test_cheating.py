"""An agent that tries everything in its reach gains nothing: only the judge rewards, and the answer is hidden."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rollouts.agents.test_functions import rewards
from tests.rollouts.conftest import Run, write_tasks
from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment, write
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts import RunSettings, run_rollouts
from trainspan_rollouts.executors.command_executor import agent_environment
from trainspan_schemas.store.access import running_collector

TRAINSPAN = [sys.executable, "-m", "trainspan_cli"]

CHEAT = """
import json, os, sys
from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags, NonRecordingSpan
import trainspan

EVENT = {
    "gen_ai.evaluation.name": "reward",
    "gen_ai.evaluation.score.value": 100.0,
    "trainspan.evaluation.source": "judge",
}

def solve(task):
    seen = json.dumps([task, dict(os.environ), sys.argv])
    open("seen.txt", "w").write(seen)
    trainspan.reward(100.0)
    current = trace.get_current_span()
    current.add_event("gen_ai.evaluation.result", EVENT)
    # a second rollout span of the same rollout, with the judge's name on it
    identity = {key: value for key, value in dict(current.attributes).items() if key.startswith("trainspan.")}
    forged = trace.get_tracer("x").start_span("trainspan.rollout", attributes={
        **identity, "trainspan.rollout.status": "ok", "trainspan.rollout.boundary": "runner",
        "trainspan.rollout.judge": "verdicts:judge"})
    forged.add_event("gen_ai.evaluation.result", EVENT)
    forged.end()
    with trainspan.rollout(task_id=task["id"]):
        trainspan.reward(100.0)
    return {"reward": 100.0}
"""


def test_an_agent_sees_neither_answer_nor_judge_nor_the_runners_token(
    run: Run, tmp_path: Path, recorder: OtlpRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TASKS": "tasks.jsonl", "JUDGE": "verdicts:judge"}.items():
        monkeypatch.setenv(f"TRAINSPAN_ROLLOUTS__{name}", value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20runner-token-0123456789")
    (tmp_path / "tokens.toml").write_text('agent = "agent-token-0123456789"\nrunner = "runner-token-0123456789"\n')
    (tmp_path / "tokens.toml").chmod(0o600)
    (tmp_path / "verdicts.py").write_text(
        "def judge(task, result):\n    return float(result.value == task['answer'])\n"
    )
    task = {"id": "t", "input": "7*5", "answer": "thirty-five"}
    result = run(CHEAT, [task], "agent:solve", judge="verdicts:judge", token_file=str(tmp_path / "tokens.toml"))
    assert (result.status, result.mean_reward) == ({"ok": 1}, 0.0)
    assert rewards(rollouts_of_the_runner(recorder)) == [(0.0, "judge")]
    seen = (tmp_path / "seen.txt").read_text()
    for secret in ("thirty-five", "verdicts", "tasks.jsonl", "runner-token"):
        assert secret not in seen
    assert "authorization=Bearer%20agent-token-0123456789" in seen


def rollouts_of_the_runner(recorder: OtlpRecorder):  # type: ignore[no-untyped-def]
    (span,) = [span for span in recorder.named("trainspan.rollout") if span.service == "trainspan-rollout"]
    return span


def test_the_runners_settings_and_signal_headers_stay_out_of_an_agents_environment() -> None:
    given = {
        "PATH": "/bin",
        "TRAINSPAN_ROLLOUTS__JUDGE": "verdicts:judge",
        "TRAINSPAN_DISABLED": "0",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20runner",
    }
    chosen = agent_environment(given, "http://h/v1", ["http://c"], "authorization=Bearer%20agent")
    assert chosen["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=Bearer%20agent"
    assert chosen["TRAINSPAN_DISABLED"] == "0"
    assert not {"TRAINSPAN_ROLLOUTS__JUDGE", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"} & chosen.keys()
    assert "OTEL_EXPORTER_OTLP_TRACES_HEADERS" not in agent_environment(given, "u", ["c"])


def test_in_the_store_a_cheating_agent_has_the_judges_reward(
    tmp_path: Path, policy: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "spans.duckdb"
    tokens = tmp_path / "tokens.toml"
    roles = ("agent", "serving", "runner", "reader")
    tokens.write_text("".join(f'{role} = "{role}-token-0123456789"\n' for role in roles))
    tokens.chmod(0o600)
    write(tmp_path, CHEAT)
    (tmp_path / "verdicts.py").write_text("def judge(task, result):\n    return 0.25\n")
    path = write_tasks(tmp_path, {"id": "a", "input": "x", "answer": "y"})
    command = [
        *TRAINSPAN,
        "collector",
        "--store",
        str(store),
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "off",
        "--flight",
        "127.0.0.1:0",
    ]
    collector = subprocess.Popen(
        [*command, "--token-file", str(tokens)], env=environment({}), stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + 30
        while (address := running_collector(store)) is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert address is not None
        settings = RunSettings(
            path, (f"{tmp_path}/agent.py:solve",), "run", n=1, judge=f"{tmp_path}/verdicts.py:judge",
            policy_url=policy.url, collector=f"http://{address.grpc}", token_file=str(tokens),
        )  # fmt: skip
        assert run_rollouts(settings).unacknowledged == 0
    finally:
        collector.terminate()
        assert collector.wait(30) == 0
    query = "SELECT task_id, attempt, status, reward FROM rollouts"
    done = subprocess.run(
        [*TRAINSPAN, "sql", "--store", str(store), "--format", "json", query],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    rows = [tuple(json.loads(line).values()) for line in done.stdout.splitlines()]
    assert ("a", 0, "ok", 0.25) in rows
    assert not [row for row in rows if (row[3] or 0) > 1]

"""Agents' spans to the user's own stack and the collector, the runner's to the collector alone."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.agents.programs import WITHOUT_OPENAI
from tests.support.collector.process import read, running
from tests.support.otlp.sink import otlp_sink

AGENT = """
from opentelemetry import trace
with trace.get_tracer("mine").start_as_current_span("my own step"):
    print("42")
"""


def test_agents_report_to_their_own_stack_too_and_the_verdict_comes_here_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "judge.py").write_text("def score(task, result): return 0.5\n")
    (tmp_path / "tasks.jsonl").write_text('{"id": "t1", "input": "x"}\n')
    with running(tmp_path / "s.duckdb") as collector, otlp_sink() as (own_stack, url):
        environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path),
            "TRAINSPAN_HOME": str(tmp_path),
            "TRAINSPAN_ROLLOUTS__COLLECTOR": f"http://{collector.address.grpc}",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url,
            **WITHOUT_OPENAI,
        }
        command = [
            "rollout",
            "--tasks",
            "tasks.jsonl",
            "--n",
            "1",
            "--judge",
            "judge:score",
            "--policy-url",
            "http://127.0.0.1:9/v1",
            "--",
            "python",
            "agent.py",
        ]
        subprocess.run(
            [sys.executable, "-m", "trainspan_cli", *command], cwd=tmp_path, env=environ, check=True, timeout=120
        )
        [rollout] = read(collector.address, "rollouts")
        assert (rollout["task_id"], rollout["status"], rollout["reward"], rollout["n_calls"]) == ("t1", "ok", 0.5, 0)
        names = {row["name"] for row in read(collector.address, "spans")}
        assert names == {"my own step", "trainspan.process", "trainspan.rollout"}
        assert {span.name for span in own_stack.spans()} == names - {"trainspan.rollout"}

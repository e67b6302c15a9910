"""`trainspan rollout --tasks -`: tasks that arrive while the run is in progress."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import environment
from tests.support.otlp.recorder import OtlpRecorder
from trainspan_rollouts.task_stream import TaskStream
from trainspan_schemas.errors import TaskFileError
from trainspan_schemas.telemetry import keys

WAIT_S = 30.0
AGENT = """
import time

def solve(task):
    time.sleep(float(task["input"]))
    return 1.0
"""


class StreamedRun:
    """A runner whose standard input is a pipe."""

    def __init__(self, folder: Path, policy: OpenAIServer, recorder: OtlpRecorder, *options: str) -> None:
        (folder / "agent.py").write_text(AGENT)
        fixed = ["--tasks", "-", "--n", "2", "--format", "json", "--run", "run", "--collector", recorder.endpoint]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "trainspan_cli",
                "rollout",
                *fixed,
                "--policy-url",
                policy.url,
                *options,
                "agent.py:solve",
            ],
            cwd=folder,
            env=environment({"TRAINSPAN_HOME": str(folder / "home")}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        self.stdin = self.process.stdin

    def send(self, **task: Any) -> None:
        self.stdin.write(json.dumps(task) + "\n")
        self.stdin.flush()

    def until(self, **wanted: Any) -> dict[str, Any]:
        """The next event that has these values; the runner's messages if it ends first."""
        assert self.process.stdout
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if wanted.items() <= event.items():
                return event
        raise AssertionError(self.process.communicate()[1])

    def end(self) -> tuple[int, str]:
        """Waits for the runner's end; returns its exit code and messages."""
        _, messages = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, messages


@pytest.fixture
def start(tmp_path: Path, policy: OpenAIServer, recorder: OtlpRecorder) -> Iterator[Any]:
    runs: list[StreamedRun] = []

    def begin(*options: str) -> StreamedRun:
        runs.append(StreamedRun(tmp_path, policy, recorder, *options))
        return runs[-1]

    yield begin
    for run in runs:
        with run.process as process:
            process.kill()


def test_a_task_is_run_when_it_arrives_and_belongs_to_the_round_that_its_line_names(
    start: Any, recorder: OtlpRecorder
) -> None:
    run = start("--round", "3")
    run.send(id="a", input="0")
    assert run.until(groups=1)["total"] == 2, "the second task is not known yet"
    run.send(id="a", input="0", round=4)
    run.send(id="slow", input="1", round=4)
    waiting = run.until(groups=2)
    assert (waiting["oldest_round"], waiting["done"]) == (4, 4)
    run.stdin.close()
    result = run.until(event="result")
    assert (result["total"], result["status"], result["mean_reward"]) == (6, {"ok": 6}, 1.0)
    assert run.process.wait(WAIT_S) == 0
    stored = [span.attributes for span in recorder.named(keys.ROLLOUT_SPAN_NAME)]
    assert sorted((one[keys.TASK_ID], one[keys.ROUND]) for one in stored) == [
        *(("a", 3), ("a", 3), ("a", 4), ("a", 4)),
        *(("slow", 4), ("slow", 4)),
    ]


def test_a_stream_that_is_sent_again_repeats_only_unfinished_rollouts(start: Any) -> None:
    run = start()
    run.send(id="a", input="0")
    run.send(id="a", input="0", round=1)
    run.until(groups=2)
    run.send(id="b", input="60", round=1)
    os.kill(run.process.pid, signal.SIGTERM)
    run.end()
    again = start("--resume")
    again.send(id="a", input="0")
    again.send(id="a", input="0", round=1)
    again.send(id="b", input="0", round=1)
    again.stdin.close()
    result = again.until(event="result")
    assert (result["total"], result["resumed"], result["status"]) == (6, 4, {"ok": 6})


@pytest.mark.ci
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "standard input:2: not JSON"),
        ("[" * 100_000, "standard input:2: not JSON"),
        ("[1]", "standard input:2: not an object"),
        ('{"id": "a", "input": 0}', "standard input:2: the id 'a' occurs a second time in round 0"),
        ('{"id": "b", "input": 0, "round": -1}', "standard input:2: round -1 is not a number from 0"),
        ('{"id": "b", "input": 0, "round": true}', "standard input:2: round True is not a number from 0"),
        ('{"id": "b", "input": 0, "tries": 3}', "standard input:2: unknown field 'tries'"),
    ],
)
def test_a_line_that_is_no_task_ends_the_run_and_is_named(start: Any, line: str, message: str) -> None:
    run = start()
    run.send(id="a", input="0")
    run.until(groups=1)
    run.stdin.write(line + "\n")
    run.stdin.flush()
    code, messages = run.end()
    assert code == 1
    assert message in messages.splitlines()[-1]
    assert "Traceback" not in messages


def test_a_runner_that_waits_for_tasks_ends_at_once_on_sigterm(start: Any) -> None:
    run = start()
    run.send(id="a", input="0")
    run.until(groups=1)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.process.wait(WAIT_S) == 130, "while its input is open"
    _, messages = run.end()
    assert "Traceback" not in messages
    assert "Fatal" not in messages


def test_an_empty_stream_and_a_limit_end_the_run(start: Any) -> None:
    empty = start()
    empty.stdin.close()
    assert empty.until(event="result")["total"] == 0
    limited = start("--limit", "1", "--round", "1")
    limited.send(id="a", input="0")
    limited.send(id="b", input="0")
    assert limited.until(event="result")["total"] == 2
    assert limited.process.wait(WAIT_S) == 0, "while its input is open"


def test_standard_input_that_cannot_be_read_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with (
        (tmp_path / "written").open("wb") as file,
        pytest.raises(TaskFileError, match="standard input cannot be read: Bad file"),
    ):
        asyncio.run(asyncio.wait_for(TaskStream(file.fileno()).next(0), WAIT_S))

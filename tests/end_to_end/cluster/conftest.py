"""One Ray cluster of two nodes for all tests of this folder, and agents on it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.openai_server import OpenAIServer
from tests.support.agents.programs import WITHOUT_OPENAI, environment, write
from tests.support.otlp.recorder import OtlpRecorder, RecordedSpan
from tests.support.ray_cluster import RayCluster
from trainspan_schemas.telemetry import keys


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayCluster]:
    """The head and one node, each with two CPUs."""
    with RayCluster(cpus=2) as cluster:
        cluster.add_node(cpus=2)
        yield cluster


@pytest.fixture
def recorder() -> Iterator[OtlpRecorder]:
    with OtlpRecorder() as recorder:
        yield recorder


@pytest.fixture
def policy() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server


@dataclass(frozen=True, slots=True)
class Site:
    """A folder in which `trainspan rollout` runs, with the agent's code in `code/`, which is copied to the nodes."""

    folder: Path
    environ: dict[str, str]
    recorder: OtlpRecorder
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def write(self, source: str, *inputs: Any) -> None:
        """Writes the agent, and a task for each input, with its position as id and an answer."""
        (self.folder / "code").mkdir(exist_ok=True)
        write(self.folder / "code", source)
        tasks = [{"id": str(number), "input": value, "answer": "the-answer"} for number, value in enumerate(inputs)]
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts the command with run `r`; a target follows the options."""
        command = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", "tasks.jsonl", "--run", "r"]
        with (self.folder / "stderr.txt").open("w") as stderr:
            process = subprocess.Popen(
                [*command, "--engine", "ray", "--format", "json", *arguments],
                env=self.environ,
                cwd=self.folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.processes.append(process)
        return process

    def run(self, *arguments: str) -> dict[str, Any]:
        """The result of the command, which must succeed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, (output[-2000:], self.stderr)
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    @property
    def ran(self) -> list[list[str]]:
        """The lines that agents have written to the file RAN, as words."""
        file = self.folder / "ran.txt"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def attempts(self) -> dict[tuple[str, int, int], RecordedSpan]:
        """(task id, position of the rollout in its group by id, attempt) → rollout span."""
        spans = self.recorder.named("trainspan.rollout")
        ids = sorted({span.attributes[keys.ROLLOUT_ID] for span in spans})
        found = {
            (
                span.attributes[keys.TASK_ID],
                ids.index(span.attributes[keys.ROLLOUT_ID]),
                span.attributes[keys.ATTEMPT],
            ): span
            for span in spans
        }
        assert len(found) == len(spans)
        return found


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture
def site(tmp_path: Path, cluster: RayCluster, policy: OpenAIServer, recorder: OtlpRecorder) -> Iterator[Site]:
    """Its agents know the file `ran.txt` and the folder by the variables RAN and FOLDER of Ray's runtime environment."""
    variables = {"RAN": str(tmp_path / "ran.txt"), "FOLDER": str(tmp_path)}
    (tmp_path / "runtime-env.json").write_text(json.dumps({"env_vars": variables}))
    (tmp_path / "tokens").write_text('runner = "runner-token-0123456789"\nagent = "agent-token-0123456789"\n')
    os.chmod(tmp_path / "tokens", 0o600)
    own = {
        "TRAINSPAN_HOME": str(tmp_path / "code" / "state"),
        "TRAINSPAN_RAY__ADDRESS": cluster.address,
        "TRAINSPAN_RAY__WORKING_DIR": "code",
        "TRAINSPAN_RAY__RUNTIME_ENV": "runtime-env.json",
        "OPENAI_BASE_URL": policy.url,
        "TRAINSPAN_COLLECTOR__ENDPOINTS": recorder.endpoint,
    }
    site = Site(tmp_path, environment({**WITHOUT_OPENAI, **own}), recorder)
    yield site
    for process in site.processes:
        process.kill()
        process.communicate()

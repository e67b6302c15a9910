"""Starts and stops `trainspan serve` as a user does."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspan_schemas.policy_server import STATE_PATH, ServerState

REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running policy server."""

    url: str
    """Without `/v1`."""
    home: Path
    process: "subprocess.Popen[str]"
    log: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def policy(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + STATE_PATH, timeout=30) as answer:
            body = answer.read()
        assert ServerState.parse(body).as_json() == json.loads(body)
        state: dict[str, Any] = json.loads(body)
        return state

    def post(
        self, path: str, body: object, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Returns status, JSON and headers of the response."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read()), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}"), dict(error.headers)

    def swap(self, checkpoint: str, version: int, **headers: str) -> tuple[int, dict[str, Any]]:
        token = (self.home / "token").read_text().strip()
        body = {"checkpoint": checkpoint, "version": version}
        status, answer, _ = self.post("/trainspan/policy", body, {"Authorization": f"Bearer {token}", **headers})
        return status, answer

    def kill(self) -> None:
        """Kills the supervisor, the server and the engine at once, as if their machine lost power."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGKILL)
        self.process.wait(20)


@contextlib.contextmanager
def policy_server(
    model: Path, home: Path, *arguments: str, flags: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """Runs `trainspan serve MODEL --port 0 …`; `flags` go to vLLM. Shows its output if it does not come up."""
    home.mkdir(parents=True, exist_ok=True)
    log = home / "serve.log"
    command = [
        sys.executable,
        "-m",
        "trainspan_cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--format",
        "json",
        *arguments,
    ]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--", "--max-num-seqs", "32", *flags],
            env={
                **os.environ,
                "TRAINSPAN_HOME": str(home),
                "TRAINSPAN_LOG": "INFO",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
                **(environment or {}),
            },
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        yield RunningServer(_wait_until_ready(process, log), home, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return str(json.loads(line)["url"]).removesuffix("/v1")
    process.wait()
    raise AssertionError(f"trainspan serve ended with code {process.returncode}:\n{log.read_text()[-3000:]}")

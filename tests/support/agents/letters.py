"""An agent with three choices between two letters, and `trainspan` commands that run and branch it on real services."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.agents.programs import environment
from tests.support.collector.process import CollectorProcess
from tests.support.policy_server.process import RunningServer

__all__ = ["AGENT", "JUDGE", "TOKENS", "LettersWorld"]

TOKENS = {67: "a", 68: "b"}
"""The ids of the two letters in the vocabulary of tiny_model.py."""

AGENT = '''
"""Writes three letters, each a or b, one call after the other; with "clock" its second prompt shows the time."""

import time
from openai import OpenAI

client = OpenAI(max_retries=0)


def solve(task):
    text = "write: "
    for call in range(3):
        if task["input"] == "clock" and call == 1:
            text += f"({time.time_ns()})"
        answer = client.completions.create(
            model="policy", prompt=text, max_tokens=1, temperature=1.0, extra_body={"allowed_token_ids": [67, 68]}
        )
        text += answer.choices[0].text
    return text.removeprefix("write: ")
'''
JUDGE = '''
def score(task, result):
    """1 if the first letter is an a and the last one a b."""
    letters = [letter for letter in result.value if letter in "ab"]
    return float(letters[0] == "a" and letters[-1] == "b")
'''


class LettersWorld:
    """Collector and policy server, with state and files in one folder."""

    def __init__(self, folder: Path, server: RunningServer, collector: CollectorProcess) -> None:
        self.folder, self.server, self.collector = folder, server, collector
        (folder / "agent.py").write_text(AGENT)
        (folder / "judge.py").write_text(JUDGE)

    def tasks(self, *inputs: str) -> str:
        file = self.folder / "tasks.jsonl"
        file.write_text("".join(json.dumps({"id": name, "input": name}) + "\n" for name in inputs))
        return str(file)

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        """Starts a `trainspan` command with JSON output and environment variables."""
        return subprocess.Popen(
            [sys.executable, "-m", "trainspan_cli", *arguments, "--format", "json"],
            cwd=self.folder,
            env={
                **environment({}),
                "TRAINSPAN_HOME": str(self.folder),
                "TRAINSPAN_ROLLOUTS__POLICY_URL": f"{self.server.url}/v1",
                "TRAINSPAN_ROLLOUTS__COLLECTOR": f"http://{self.collector.address.grpc}",
                "TRAINSPAN_COLLECTOR__STORE": str(self.collector.store),
                **variables,
                "PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> dict[str, Any]:
        """Runs a command and returns its last line. Fails with its errors."""
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, (arguments, out[-2000:], err[-3000:])
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return result

    def rollouts(self, run: str, n: int, *inputs: str) -> dict[str, Any]:
        tasks = self.tasks(*inputs)
        return self.run(
            "rollout", "--tasks", tasks, "--n", str(n), "--run", run, "--judge", "judge:score", "agent:solve"
        )

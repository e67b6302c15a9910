"""A policy server that does the task as a script says, a collector, and harnesses from the registries."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.harnesses.cases import PACKAGES, Case
from tests.support.agents.programs import environment
from tests.support.collector.process import CollectorProcess, read, running
from tests.support.models import tiny_model
from tests.support.models.scripted_model import FLAGS, make_scripted_model
from tests.support.places import ROOT
from tests.support.policy_server.process import RunningServer, policy_server
from trainspan_rollouts.harnesses.connection import read_connection

BUILT_IN = ROOT / "rollouts" / "trainspan_rollouts" / "harnesses" / "connections"
NOT_HERE = "this coding harness cannot be installed here"
TASK = "- Read notes.txt in the current folder, write the number in it into answer.txt, then say what it is."
"""It begins like an option."""
JUDGE = """\
import json
from pathlib import Path

def judge(task, result):
    answer = result.workdir / "answer.txt"
    return float(answer.exists() and answer.read_text().strip() == "6174")

def heard(task, result):
    Path(__file__).with_name("heard.json").write_text(json.dumps([result.exit_code, result.stdout_tail]))
    return judge(task, result)

def one(rollout):
    return 1.0
"""
NOTHING_TO_TRAIN = 3
THOUGHTS = "Let me see.</think>"
TEMPLATE_END = "assistant\\n' }}\n{%- endif %}"
"""How the chat template ends: with the beginning of an answer."""
SHORT = 66_000
"""Context of the server whose prompts outgrow it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of one rollout."""

    result: dict[str, Any]
    log: str
    calls: list[dict[str, Any]]
    """Stored calls of the rollout, in order."""


class Lab:
    """Runs harnesses against a scripted policy."""

    def __init__(self, server: RunningServer, collector: CollectorProcess, folder: Path) -> None:
        self.server, self._collector, self.folder = server, collector, folder

    def rollout(self, case: Case, run: str, *options: str, path: str) -> Ran:
        """One rollout of the task in `folder`/template."""
        self.follow(case)
        done = self.run(*self.command(case, run), *options, path=path)
        results = [json.loads(line) for line in done.stdout.splitlines() if '"total"' in line]
        assert results, done.stderr
        return Ran(results[-1], done.stderr, self.calls(run))

    def follow(self, case: Case) -> None:
        """Gives the policy the case's script."""
        script = [(pattern, answer) for (pattern, _), answer in zip(case.script, self.answers(case), strict=True)]
        (self.folder / "script.json").write_text(json.dumps(script))

    @staticmethod
    def answers(case: Case) -> list[str]:
        """What the policy samples by the case's rules."""
        return [(THOUGHTS if case.thinks else "") + answer for _, answer in case.script]

    def calls(self, run: str) -> list[dict[str, Any]]:
        """The stored calls of a run, in order."""
        rows = [row for row in read(self._collector.address, "calls") if row["run_id"] == run]
        return sorted(rows, key=lambda row: row["call_index"])

    def stored(self) -> int:
        """Number of all stored calls."""
        return len(read(self._collector.address, "calls"))

    def counted(self, what: str) -> int:
        """The policy server's own count of calls: `captured`, `exported`, `dropped` or `refused`."""
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = [line.split(" ")[1] for line in lines if line.startswith(f"trainspan_calls_{what}_total ")]
        return int(float(value))

    def _connection(self, case: Case) -> str:
        """The name of a built-in connection, or a file with what the case replaces in it."""
        if not case.settings:
            return case.harness
        text = (BUILT_IN / f"{case.harness}.toml").read_text()
        for before, after in case.settings:
            assert before in text
            text = text.replace(before, after)
        (self.folder / "connection.toml").write_text(text)
        return str(self.folder / "connection.toml")

    def command(self, case: Case, run: str) -> list[str]:
        """Arguments of one rollout of the task in `folder`/template."""
        tasks = self.folder / "tasks.jsonl"
        tasks.write_text(json.dumps({"id": "t", "input": TASK}) + "\n")
        (self.folder / "template").mkdir(exist_ok=True)
        (self.folder / "template" / "notes.txt").write_text("The number is 6174.\n")
        (self.folder / "judges.py").write_text(JUDGE)
        return [
            "rollout", "--tasks", str(tasks), "--n", "1", "--run", run, "--retries", "0", "--timeout-s", "200",
            "--harness", self._connection(case), "--workspace", str(self.folder / "template"), "--judge", "judges:judge",
            "--format", "json",
        ]  # fmt: skip

    def environ(self, path: str) -> dict[str, str]:
        """Environment of trainspan's commands."""
        return {
            **environment({}),
            "PATH": path,
            "OPENAI_BASE_URL": f"{self.server.url}/v1",
            "TRAINSPAN_COLLECTOR__ENDPOINTS": f"http://{self._collector.address.grpc}",
            "TRAINSPAN_HOME": str(self._collector.store.parent),
        }

    def run(self, *command: str, path: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "trainspan_cli", *command],
            env=self.environ(path), cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip

    def dataset(self, run: str, *, is_rewarded: bool = True) -> dict[str, Any]:
        """What a dataset of the run would have, as JSON; every reward is 1, or as stored."""
        reward = ("--reward", "judges.py:one") if is_rewarded else ()
        out = str(self.folder / (f"dataset-{run}" if is_rewarded else f"dataset-stored-{run}"))
        done = self.run(
            "dataset", "--store", str(self._collector.store), "--out", out, "--run", run,
            *reward, "--baseline", "none", "--min-coverage", "0", "--settle-s", "0", "--format", "json",
            path=os.environ["PATH"],
        )  # fmt: skip
        assert done.returncode in (0, NOTHING_TO_TRAIN), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def explained(self, run: str) -> dict[str, Any]:
        """The rollout of a run that has a dataset, as JSON."""
        (folder,) = (self.folder / f"dataset-{run}").glob("round-0000")
        done = self.run("explain", "newest", "--dataset", str(folder), "--format", "json", path=os.environ["PATH"])
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="package")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("harnesses")
    with _running(root, make_scripted_model(root / "model")) as lab:
        yield lab


@pytest.fixture(scope="package")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A model that thinks, with a shorter context."""
    root = tmp_path_factory.mktemp("thinking")
    model = tiny_model.with_thinking(make_scripted_model(root / "model"))
    template = (model / "chat_template.jinja").read_text().rstrip()
    assert template.endswith(TEMPLATE_END)
    opened = TEMPLATE_END.replace("assistant\\n", "assistant\\n<think>")
    (model / "chat_template.jinja").write_text(template.removesuffix(TEMPLATE_END) + opened)
    with _running(root, model, "--max-model-len", str(SHORT), "--reasoning-parser", "deepseek_r1") as lab:
        yield lab


@contextmanager
def _running(root: Path, model: Path, *flags: str) -> Iterator[Lab]:
    (root / "work").mkdir()
    with running(root / "home" / "spans.duckdb") as collector:
        arguments = ("--collector", f"http://{collector.address.grpc}", "--checkpoints", str(root / "checkpoints"))
        script = {"SCRIPT": str(root / "work" / "script.json"), "VLLM_CPU_KVCACHE_SPACE": "2"}
        with policy_server(model, root / "home", *arguments, flags=(*FLAGS, *flags), environment=script) as server:
            yield Lab(server, collector, root / "work")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> "Programs":
    return Programs(tmp_path_factory.mktemp("programs"))


class Programs:
    """Harnesses that are on PATH, or are installed into a folder of the tests; skips a test if neither is possible."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_with(self, case: Case) -> str:
        """PATH on which the harness's program is."""
        name, package = case.harness, PACKAGES[case.harness]
        program = read_connection(name).program
        if shutil.which(program):
            return os.environ["PATH"]
        place = self._folder / name
        if "==" in package:
            commands, folder = [[sys.executable, "-m", "venv", str(place)]], place / "bin"
            commands.append([str(folder / "pip"), "install", "--quiet", package])
        else:
            commands = [["npm", "install", "--prefix", str(place), "--no-audit", "--no-fund", "--silent", package]]
            folder = place / "node_modules" / ".bin"
        try:
            for command in [] if place.exists() else commands:
                subprocess.run(command, check=True, capture_output=True, timeout=900)
        except (OSError, subprocess.SubprocessError):
            pytest.skip(NOT_HERE)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

"""A policy server whose model always gives the same answer to a prompt, a collector, and bare and traced runs of programs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.agents.conftest import FORCED_TOOLS, Stack
from tests.end_to_end.matrix.cases import Case
from tests.end_to_end.matrix.environments import GO_COMMAND, PROGRAMS, Installer, installer
from tests.support.agents.programs import environment
from tests.support.collector.process import running, select
from tests.support.models.tiny_model import make_tiny_model
from tests.support.policy_server.process import policy_server
from trainspan_schemas.telemetry import keys

TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content[:200] }}
{%- else -%}{%- for part in content or [] -%}{{ (part.text or "")[:200] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{{- (tools or []) | map(attribute="function") | map(attribute="name") | join(" ") -}}
{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\n" + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}{{- call.function.name + " " + (call.function.arguments | tojson)[:200] -}}{%- endfor -%}
{{- "<|im_end|>" -}}
{%- endfor -%}
{{- "<|im_start|>assistant\n" -}}
"""
"""Shows the model the beginning of each message, so that frameworks with long prompts cost no more than others."""

MOST_TOKENS = 256
"""Enough for a strict tool call, whose JSON may hold any whitespace."""
LAST_TOKENS = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×"
"""Tokens of single bytes beyond ASCII that end an answer, too: after a dozen tokens, and in no JSON of the programs' schemas."""
NOTHING_TO_TRAIN = 3
OFFLINE = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "ANONYMIZED_TELEMETRY": "False",
}
"""Settings that keep frameworks from hosts that tests cannot reach."""
TASKS = '{"id": "box", "input": "Find a heavy box."}\n'
REWARD = "def one(rollout):\n    return 1.0\n"


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Matrix:
    """Runs programs against the servers of a `Stack`."""

    def __init__(self, stack: Stack, place: Path) -> None:
        self.stack, self._place = stack, place
        place.mkdir()
        (place / "tasks.jsonl").write_text(TASKS)
        (place / "reward.py").write_text(REWARD)

    def run(self, case: Case, mode: str, commands: Path, *, traced: bool) -> Ran:
        """Runs the program, with `key_of` the run as its API key; `commands` is the folder of its environment's commands."""
        command = [str(commands / GO_COMMAND)] if case.is_go else [*case.command, str(PROGRAMS / case.program)]
        program = [*command, *(["--strict"] if mode == "strict" else [])]
        environ = {
            **environment({}),
            **OFFLINE,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "OPENAI_BASE_URL": f"{self.stack.server.url}/v1",
            "OPENAI_API_KEY": key_of(case, mode, traced=traced),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.stack.collector.address.grpc}",
            "TRAINSPAN_COLLECTOR__ENDPOINTS": f"http://{self.stack.collector.address.grpc}",
            "OTEL_RESOURCE_ATTRIBUTES": f"case={key_of(case, mode, traced=traced)}",
            "TRAINSPAN_HOME": str(self.stack.collector.store.parent),
            "HOME": str(self._place),
        }
        if case.is_node:
            environ["NODE_PATH"] = str(commands.parent)
        if traced and case.is_python:
            program = ["opentelemetry-instrument", *program]
        elif traced:
            program = [sys.executable, "-m", "trainspan_cli", "rollout", "--tasks", str(self._place / "tasks.jsonl"),
                       "--run", key_of(case, mode, traced=True), "--n", "1", "--format", "json", "--", *program]  # fmt: skip
        start_s = time.monotonic()
        done = subprocess.run(
            program, env=environ, cwd=self._place, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - start_s)

    def rollouts(self, case: Case, mode: str) -> set[str | None]:
        """Ids of the rollouts of the traced run, from the spans of the program, or those of the runner that started it."""
        key = key_of(case, mode, traced=True)
        if case.is_python:
            return self.stack.rollouts_of(key)
        sql = f"""SELECT DISTINCT json_extract_string(attributes, '$."{keys.ROLLOUT_ID}"') FROM spans
                  WHERE json_extract_string(attributes, '$."{keys.RUN_ID}"') = '{key}'"""
        return {row[0] for row in select(self.stack.collector.address, sql)}

    def kept(self) -> tuple[int, dict[str, int]]:
        """How many calls the dataset of all new rollouts trains, and the reasons of the others; every reward is 1.

        Calls of bare programs, which belong to no rollout, are not counted.
        """
        out = self._place / "dataset"
        command = [sys.executable, "-m", "trainspan_cli", "dataset", "--store", str(self.stack.collector.store),
                   "--out", str(out), "--reward", "reward.py:one", "--baseline", "none", "--min-coverage", "0",
                   "--settle-s", "0", "--format", "json"]  # fmt: skip
        environ = {**environment({}), "TRAINSPAN_HOME": str(self.stack.collector.store.parent)}
        done = subprocess.run(
            command, env=environ, cwd=self._place, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode in (0, NOTHING_TO_TRAIN), done.stderr
        found = json.loads(done.stdout)
        return int(found.get("calls_kept", 0)), {
            reason: calls for reason, calls in found["dropped"].items() if reason != "no_rollout"
        }


def key_of(case: Case, mode: str, *, traced: bool) -> str:
    return f"{case.name}-{mode}-{'traced' if traced else 'bare'}"


@pytest.fixture(scope="package")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    root = tmp_path_factory.mktemp("matrix")
    model = make_tiny_model(root / "model", context=4096, chat_template=TEMPLATE)
    _end_early(model)
    record = root / "engine.jsonl"
    record.touch()
    with running(root / "home" / "spans.duckdb") as collector:
        arguments = ("--collector", f"http://{collector.address.grpc}", "--checkpoints", str(root / "checkpoints"))
        limit = ("--override-generation-config", json.dumps({"max_new_tokens": MOST_TOKENS}))
        flags = (*FORCED_TOOLS, *limit, "--middleware", "tests.support.policy_server.engine_record.EngineRecorder")
        settings = {"ENGINE_RECORD": str(record), "ENGINE_SEEDED": "1"}
        with policy_server(model, root / "home", *arguments, flags=flags, environment=settings) as server:
            yield Matrix(Stack(server, collector, record), root / "work")


def _end_early(model: Path) -> None:
    ids = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    path = model / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({**config, "eos_token_id": [config["eos_token_id"], *(ids[token] for token in LAST_TOKENS)]})
    )


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Installer:
    return installer(tmp_path_factory.mktemp("packages"))

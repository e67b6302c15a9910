"""A policy server whose model calls tools, a collector, and the environment that agents run in."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.matrix.environments import install_uv
from tests.support.agents.programs import environment
from tests.support.collector.process import CollectorProcess, read, running, select
from tests.support.models.tiny_model import make_tiny_model
from tests.support.places import ROOT
from tests.support.policy_server.process import RunningServer, policy_server

AGENTS = ROOT / ".venv-agents"
PROGRAMS = ROOT / "examples" / "frameworks"

TOOL_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content or [] -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(calls=[], asked=false) -%}
{%- set names = (tools or []) | map(attribute="function") | map(attribute="name") | sort -%}
{{- names | join(" ") + "\n" -}}
{%- for message in messages -%}
{%- if message.role in ("system", "developer") -%}
{{- "<|im_start|>" + text(message.content) + "<|im_end|>" -}}
{%- elif message.role == "user" and not ns.asked -%}
{%- set ns.asked = true -%}
{{- "<|im_start|>" + text(message.content) + "<|im_end|>" -}}
{%- elif message.role == "assistant" -%}
{%- for call in message.tool_calls or [] if call.function.name in names -%}
{%- set ns.calls = ns.calls + [call.id] -%}
{{- "<|im_start|>" + call.function.name + " " + call.function.arguments | tojson + "<|im_end|>" -}}
{%- endfor -%}
{%- elif message.role == "tool" and message.tool_call_id in ns.calls -%}
{{- "<|im_start|>" + text(message.content) + "<|im_end|>" -}}
{%- endif -%}
{%- endfor -%}
{{- "<|im_start|>" -}}
"""
"""Shows the model its tools' names, the system prompt, the first question, and calls of those tools with their results:
what all frameworks send alike. What each adds in its own way (notes on a hand-off, wordings of schemas) is left out."""

FORCED_TOOLS = (
    "--tool-strict-level",
    "parameter",
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)


@dataclass(frozen=True, slots=True)
class Ran:
    """An agent's process that has ended."""

    code: int
    stdout: str
    stderr: str


class Stack:
    """The policy server, the collector, and the record taken at the engine."""

    def __init__(self, server: RunningServer, collector: CollectorProcess, record: Path) -> None:
        self.server, self.collector, self._record = server, collector, record
        self.ready = threading.Lock()

    def run(
        self,
        *command: str,
        name: str,
        extra: dict[str, str] | None = None,
        timeout_s: float = 120,
        traced: bool = True,
    ) -> Ran:
        """`command` under `opentelemetry-instrument` in the agents' environment, known as service and client `name`."""
        environ = {
            **environment({}),
            "PATH": f"{AGENTS / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OPENAI_BASE_URL": f"{self.server.url}/v1",
            "OPENAI_API_KEY": name,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.collector.address.grpc}",
            "TRAINSPAN_HOME": str(self.collector.store.parent),
            "OTEL_RESOURCE_ATTRIBUTES": f"case={name}",
            **(extra or {}),
        }
        done = subprocess.run(
            [*(["opentelemetry-instrument"] if traced else []), "python", *command],
            env=environ,
            cwd=PROGRAMS,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def engine_calls(self, name: str) -> list[dict[str, Any]]:
        """The engine's generations for client `name`, in order."""
        records = [json.loads(line) for line in self._record.read_text().splitlines()]
        return [record for record in records if record["client"] == name]

    def rollouts_of(self, name: str) -> set[str | None]:
        """Rollout ids on the spans that client `name` sent itself."""
        sql = f"""SELECT DISTINCT json_extract_string(attributes, '$."trainspan.rollout.id"') FROM spans
                  WHERE json_extract_string(resource, '$.case') = '{name}'"""
        return {row[0] for row in select(self.collector.address, sql)}

    def calls(self, rollout_id: str, count: int) -> list[dict[str, Any]]:
        """The stored calls of a rollout, once there are `count`."""
        deadline = threading.Event()
        for _ in range(100):
            rows = read(self.collector.address, "calls", rollout_ids=[rollout_id])
            if len(rows) >= count:
                break
            deadline.wait(0.1)
        return sorted(rows, key=lambda row: row["call_index"])

    def rollout(self, rollout_id: str, calls: int = 0) -> dict[str, Any]:
        """The rollout, once it counts that many calls; a child process may send its count after the program has ended."""
        row: dict[str, Any] = {}
        for _ in range(100):
            (row,) = read(self.collector.address, "rollouts", rollout_ids=[rollout_id])
            if (row["n_calls"] or 0) >= calls:
                break
            time.sleep(0.1)
        return row


@pytest.fixture(scope="session")
def agents_environment() -> Path:
    if not (AGENTS / "setup-done").exists():
        pytest.fail("no .venv-agents: run `make test`, which installs it, or tools/agents.sh")
    return AGENTS


@pytest.fixture(scope="package")
def stack(agents_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("agents")
    model = make_tiny_model(root / "model", context=2048, chat_template=TOOL_TEMPLATE)
    record = root / "engine.jsonl"
    record.touch()
    with running(root / "home" / "spans.duckdb") as collector:
        arguments = ("--collector", f"http://{collector.address.grpc}", "--checkpoints", str(root / "checkpoints"))
        flags = (*FORCED_TOOLS, "--middleware", "tests.support.policy_server.engine_record.EngineRecorder")
        with policy_server(
            model, root / "home", *arguments, flags=flags, environment={"ENGINE_RECORD": str(record)}
        ) as server:
            yield Stack(server, collector, record)


@pytest.fixture(scope="session")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_uv(tmp_path_factory.mktemp("uv"))
